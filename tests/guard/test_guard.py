"""Test that a guard finds faults in a running model, raises no false alarm, and leaves no trace."""

import copy
import math
import pickle
import random
import signal
import subprocess
import sys
import threading
import warnings
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

from guard_faults import (
    NOT_OF_A_CALL,
    PLANTED,
    SERVED,
    TRAINED,
    calls_until_caught_in_serving,
    steps_until_caught_in_training,
)
from prepare import Workload
from prepare.audit import audit
from prepare.core.utils.process_state import PROCESS_STATE
from prepare.errors import DriftError, GuardError, GuardWarning, RefusedError
from prepare.pipeline import Pipeline
from prepare.testing.networks import facts
from verify_faults import FAULTS

EVERY, ALL = 40, math.inf
STEPS = {
    "conv2d_memory_format": {},
    "repair_layout": {"force": True},
    "input_format": {"attach": True},
}


class Block(nn.Module):
    """Code of its own between its modules, which `keep_layout` rewrites."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(8, 8, 3), nn.InstanceNorm2d(8, affine=True)

    def forward(self, x):
        return torch.cat([self.norm(self.conv(x)).relu(), x[:, :, 1:-1, 1:-1]], 1)


def network():
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Dropout(0.1)]
    return nn.Sequential(*layers, Block(), nn.MaxPool2d(2), nn.Conv2d(16, 4, 1))


def prepared(steps=STEPS, *, training=False):
    pipeline = Pipeline.from_config(steps)
    return pipeline, pipeline.apply(network().train(training), known_issues="ignore")


def images(size=16, samples=2):
    return torch.randn(samples, 3, size, size)


def add(module, value=0.1, size=None):
    """Make a module add a number to its result, for inputs of this size."""
    forward = module.forward
    module.forward = lambda x: forward(x) + value * (size in (None, x.shape[-1]))


def train(model, guard, steps, batch=None):
    for _ in range(steps):
        model(images() if batch is None else batch).square().mean().backward()
        guard()
        model.zero_grad()


# ----------------------------------------------------------------------------------------- what it finds


@pytest.mark.parametrize("name", SERVED[::12])
def test_a_fault_of_one_shape_is_found_at_its_first_call(name):
    assert calls_until_caught_in_serving(name) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", SERVED)
def test_every_fault_of_one_shape_is_found_at_its_first_call(name):
    assert calls_until_caught_in_serving(name) == 1


@pytest.mark.parametrize("name", TRAINED[::36])
def test_a_fault_of_one_shape_is_found_within_n_steps(name):
    assert steps_until_caught_in_training(name, EVERY) <= EVERY


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINED)
def test_every_fault_of_one_shape_is_found_within_n_steps(name):
    assert steps_until_caught_in_training(name, EVERY) <= EVERY


def test_the_faults_are_those_of_a_verification():
    left_out = {*NOT_OF_A_CALL, "another bn.num_batches_tracked"}
    assert set(FAULTS) == set(PLANTED) | left_out
    assert len({*SERVED, *TRAINED}) >= 60


def test_a_difference_names_the_module_the_numbers_and_the_call():
    _, model = prepared()
    with torch.no_grad(), prepared()[0].guard(model) as guard:
        model(images())
        add(model[4].conv, size=20)
        with pytest.raises(
            GuardError, match=r"4\.conv: its outputs are off by [\d.e-]+ of their scale"
        ):
            model(images(22))
    (found,) = guard.differences
    assert found.module == "4.conv"
    assert found.call == "[2, 8, 20, 20] float32 channels_last, eval"


STEPS_OF_KINDS = {
    "repaired": STEPS,
    "with rewritten calls": STEPS | {"keep_layout": {}},
    "kept in float32": {
        "half": {"dtype": "bfloat16", "keep": ["4"]},
        "input_format": {"attach": True},
    },
    "in bfloat16": {"half": {"dtype": "bfloat16"}, "input_format": {"attach": True}},
    "in channels_last": STEPS,
    "compiled": {"compile": {"backend": "eager"}},
}


@pytest.mark.parametrize("kind", STEPS_OF_KINDS)
def test_each_kind_of_change_is_looked_at(kind):
    pipeline, model = prepared(STEPS_OF_KINDS[kind])
    with torch.no_grad(), pipeline.guard(model) as guard:
        name = next(name for name, each in guard.watched.items() if each == kind)
        model(images())
        assert guard.left_out == {}
        looks = guard.looks
        assert looks >= len(set(guard.watched) - {""})
        model(images())
        assert guard.looks == looks
        assert kind in repr(guard)
        module = model.get_submodule(name)
        module.register_forward_hook(lambda _m, _a, out: out * 1.5)
        if kind == "compiled":  # a hook that is added later does not run
            with torch.no_grad():
                model[6].weight.mul_(1)
            torch._dynamo.reset()
        with pytest.raises(GuardError):
            model(images(20))


def test_weights_in_8_bits_are_compared_with_their_values():
    pytest.importorskip("torchao")
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
    pipeline = Pipeline.from_config({"quantize": {}})
    pipeline.apply(model)
    with torch.no_grad(), pipeline.guard(model) as guard:
        model(torch.randn(3, 8))
        assert (guard.watched["2"], guard.looks, guard.left_out) == ("in 8 bits", 3, {})
        add(model[2], 0.05)
        with pytest.raises(GuardError, match=r"^2: its outputs"):
            model(torch.randn(4, 8))


def test_another_stride_dtype_autocast_or_mode_is_another_key():
    pipeline, model = prepared({"conv2d_memory_format": {}})
    batch = images()
    with pipeline.guard(model) as guard:
        looks = []

        def call(x):
            model(x)
            looks.append(guard.looks)

        with torch.no_grad():
            call(batch)
            call(batch)
            call(batch.to(memory_format=torch.channels_last))
            with torch.autocast("cpu", torch.bfloat16):
                call(batch)
            model.train()
            call(batch)
            model.eval()
        call(batch)
        with torch.inference_mode():
            call(batch)
    assert [a < b for a, b in pairwise(looks)] == [False, *[True] * 4, False]
    assert guard.differences == []


def test_drift_is_found_in_training_and_at_a_new_key():
    pipeline, model = prepared(training=True)
    guard = pipeline.guard(model, every=2)
    model[0].weight.data = model[0].weight.data.contiguous()
    with pytest.raises(DriftError, match=r"0\.weight"):
        train(model, guard, 2)
    with pytest.raises(DriftError, match=r"0\.weight"), torch.no_grad():
        model.eval()(images())


def test_a_module_in_train_mode_is_found_in_a_model_that_serves():
    pipeline, model = prepared()
    model[3].train()  # dropout that is kept on, before the guard is made
    with torch.no_grad(), pipeline.guard(model) as guard:
        model(images())
        model[1].train()
        with pytest.raises(DriftError, match="1: is in train mode in a model in eval mode"):
            model(images(20))
        model.train()(images(24))
        assert guard.differences == []


def test_state_of_the_optimizer_is_checked_for_drift():
    pipeline, model = prepared(training=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    guard = pipeline.guard(model, every=1, share=ALL, optimizer=optimizer)
    train(model, guard, 1)
    model(images()).mean().backward()
    optimizer.step()
    state = optimizer.state[model[0].weight]
    state["momentum_buffer"] = state["momentum_buffer"].contiguous()
    with pytest.raises(DriftError, match="momentum_buffer"):
        guard()


# -------------------------------------------------------------------------------------- what it then does


def test_warn_warns_once_for_each_module():
    pipeline, model = prepared()
    guard = pipeline.guard(model, on_difference="warn")
    add(model[6])
    with torch.no_grad():
        with pytest.warns(GuardWarning, match="6: its outputs"):
            model(images())
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model(images(20))
    assert [found.module for found in guard.differences] == ["6", "6"]


@pytest.mark.parametrize("training", [False, True])
def test_a_module_that_is_put_back_has_the_numbers_of_torch(training, monkeypatch):
    pipeline, model = prepared(training=training)
    model[3].p = 0.0
    plain = network().train(training)
    plain[3].p = 0.0
    plain.load_state_dict(model.state_dict())
    original, repaired = plain[4].norm, type(model[4].norm)
    forward = repaired.forward
    monkeypatch.setattr(repaired, "forward", lambda self, x: forward(self, x) * 1.1)
    assert pipeline.check(model) == []
    guard = pipeline.guard(model, every=1, share=ALL, on_difference="fallback")
    seen = {}
    model[4].norm.register_forward_hook(lambda m, args, out: seen.update(given=args[0], out=out))

    def run():
        with torch.set_grad_enabled(training):
            first = model(images())
        if training:
            first.mean().backward()
            guard()
            model(images())

    with pytest.warns(GuardWarning, match="runs there in the contiguous format from now on"):
        run()
    assert type(model[4].norm) is nn.InstanceNorm2d
    expected = original(seen["given"].contiguous())
    assert torch.equal(seen["out"], expected)
    assert guard.differences[0].module == "4.norm"
    plan = pipeline.plan(model)
    assert "4.norm" in [name for action in plan.actions for name in action.modules]
    train(model, guard, 1) if training else None
    assert guard.find_drift() == []


def test_a_compiled_model_that_is_put_back_runs_uncompiled():
    pipeline, model = prepared({"compile": {"backend": "eager"}})
    plain, batch = network().eval(), images()
    guard = pipeline.guard(model, on_difference="fallback")
    compiled = vars(model)["_compiled_call_impl"]
    assert pipeline.check(model) == []
    compiled.compiled = lambda x: plain(x) + 1
    with torch.no_grad(), pytest.warns(GuardWarning, match="it runs uncompiled from now on"):
        assert torch.equal(model(batch), plain(batch))
    assert guard.looks == 1
    with torch.no_grad():
        assert torch.equal(model(batch), plain(batch))
    guard.remove()
    assert not model._forward_pre_hooks


def test_a_convolution_that_is_put_back_is_contiguous_in_the_audit():
    pipeline, model = prepared()
    plan = pipeline.plan(network())
    assert audit(model, plan=plan).summary["convolutions"]["converted"] == 3
    guard = pipeline.guard(model, on_difference="fallback")
    wrong = model[0].register_forward_hook(lambda _m, args, out: out * 1.1)
    with pytest.warns(GuardWarning), torch.no_grad():
        model(images())
    wrong.remove()
    assert audit(model, plan=plan).summary["convolutions"]["converted"] == 2
    batch = images()
    with torch.no_grad():
        assert torch.equal(model[0](batch), network()[0](batch))
    assert guard.find_drift() == []


def test_a_weight_in_training_is_put_back_only_with_its_optimizer():
    pipeline, model = prepared(training=True)
    with pipeline.guard(model, every=1, share=ALL, on_difference="fallback") as guard:
        add(model[0])
        with pytest.raises(GuardError, match="cannot be put back: its weights would change"):
            train(model, guard, 1)
    del model[0].forward
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with pipeline.guard(
        model, every=1, share=ALL, on_difference="fallback", optimizer=optimizer
    ) as guard:
        add(model[0])
        model(images()).mean().backward()
        optimizer.step()
        with pytest.warns(GuardWarning, match="from now on"):
            guard()
    state = optimizer.state[model[0].weight]["momentum_buffer"]
    assert state.is_contiguous()
    assert model[0].weight.is_contiguous()


def test_a_script_and_a_log_are_written_into_the_folder(tmp_path, monkeypatch):
    pipeline, model = prepared({"conv2d_memory_format": {}})
    monkeypatch.setattr(
        "prepare.reduce.reduce", lambda *_args, **_options: type("R", (), {"script": "print(1)\n"})
    )
    guard = pipeline.guard(model, on_difference="warn", folder=tmp_path / "guard")
    add(model[6])
    with torch.no_grad(), pytest.warns(GuardWarning, match=r"guard-6\.py"):
        model(images())
    assert (tmp_path / "guard" / "guard-6.py").read_text() == "print(1)\n"
    assert (tmp_path / "guard" / "guard.log").read_text() == f"{guard.differences[0]}\n"


class Odd(nn.Module):
    """Computed and tied weights, lists of weights, fast paths, and operations in place."""

    def __init__(self):
        super().__init__()
        self.conv = nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 8, 3))
        self.old, self.act = nn.utils.spectral_norm(nn.Conv2d(8, 8, 3)), nn.ReLU(inplace=True)
        self.lstm = nn.LSTM(8, 8, batch_first=True, dropout=0.2, num_layers=2)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True, dropout=0.1)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.second.weight = self.first.weight

    def forward(self, x):
        x = self.act(self.old(self.act(self.conv(x)))).flatten(2).transpose(1, 2)
        x, _ = self.lstm(x)
        x, _ = self.attention(x, x, x)
        return self.second(self.act(self.first(self.encoder(x))))


@pytest.mark.parametrize("training", [False, True])
def test_modules_of_every_kind_run_alone_without_a_false_alarm(training):
    torch.manual_seed(0)
    pipeline, model = Pipeline.from_config(STEPS), Odd().train(training)
    pipeline.apply(model, known_issues="ignore")
    with pipeline.guard(model, every=1, share=ALL) as guard:
        if training:
            train(model, guard, 1, images(8))
        else:
            with torch.no_grad():
                model(images(8))
    assert guard.looks >= 10
    assert guard.left_out == {}


# ------------------------------------------------------------------------------------- what it leaves alone


def states():
    numbers = np.random.get_state()[1].tolist()  # noqa: NPY002
    return random.getstate(), torch.get_rng_state().tolist(), numbers


def test_a_look_changes_neither_the_model_nor_random_numbers():
    pipeline, model = prepared()
    batch = images()
    torch.manual_seed(1)
    np.random.seed(1)  # noqa: NPY002
    before = facts(model), states()
    with torch.no_grad():
        plain = model(batch)
        with pipeline.guard(model) as guard:
            looked_at = model(batch)
    assert guard.looks > 6
    assert torch.equal(plain, looked_at)
    assert (facts(model), states()) == before
    assert nn.Module.__call__.__name__ == "_wrapped_call_impl"


def test_training_with_looks_ends_in_the_same_weights():
    def trained(*, guarded):
        pipeline, model = prepared(training=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        guard = pipeline.guard(model, every=1, share=ALL) if guarded else lambda: None
        torch.manual_seed(2)
        for _ in range(4):
            model(images()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            guard()
        assert not guarded or guard.looks > 20
        return model.state_dict()

    looked_at, plain = trained(guarded=True), trained(guarded=False)
    assert all(torch.equal(looked_at[name], plain[name]) for name in plain)


def test_a_removed_guard_leaves_no_hook():
    pipeline, model = prepared()
    before = facts(model)
    guard = pipeline.guard(model)
    assert facts(model) != before
    guard.remove()
    assert facts(model) == before
    with torch.no_grad():
        model(images())
    assert guard.looks == 0


def test_a_copy_of_a_guarded_model_is_not_guarded(tmp_path):
    pipeline, model = prepared()
    guard = pipeline.guard(model)
    copied, unpickled = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    batch = images()
    with torch.no_grad():
        outputs = [each(batch) for each in (copied, unpickled, loaded)]
        assert guard.looks == 0
        assert all(torch.equal(out, model(batch)) for out in outputs)
        again = pipeline.guard(copied)
        copied(batch)
    assert again.looks == guard.looks > 0


def test_an_error_of_the_model_ends_the_look():
    pipeline, model = prepared()
    with pipeline.guard(model) as guard, torch.no_grad():
        with pytest.raises(RuntimeError, match="expected input"):
            model(torch.randn(2, 5, 16, 16))
        assert nn.Module.__call__.__name__ == "_wrapped_call_impl"
        model(images())
        assert guard.looks > 6


class Stops(nn.Module):
    """Calls `stop` between its modules."""

    def __init__(self):
        super().__init__()
        self.conv, self.inner, self.stop = nn.Conv2d(3, 4, 3), nn.Identity(), lambda: None

    def forward(self, x):
        x = self.conv(x)
        self.stop()
        return self.inner(x)


def raise_interrupt(*_):
    raise KeyboardInterrupt


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("where", ["module", "signal", "model"])
def test_an_interrupt_of_the_model_ends_the_look(where, training):
    pipeline = Pipeline.from_config({"conv2d_memory_format": {}})
    model = pipeline.apply(Stops().train(training))
    with pipeline.guard(model, every=1, share=ALL) as guard, torch.set_grad_enabled(training):
        if where == "module":
            model.inner.forward = raise_interrupt
        else:
            signalled = lambda: signal.raise_signal(signal.SIGINT)  # noqa: E731
            model.stop = signalled if where == "signal" else raise_interrupt
        with pytest.raises(KeyboardInterrupt):
            model(images())
        if where != "model":  # torch runs no hook then: the next call ends the look
            assert nn.Module.__call__.__name__ == "_wrapped_call_impl"
            assert is_free(PROCESS_STATE)
        model.stop = lambda: None
        vars(model.inner).pop("forward", None)
        output = model(images())
        output.square().mean().backward() if training else None
        guard()
        assert guard.looks >= 3
    assert nn.Module.__call__.__name__ == "_wrapped_call_impl"
    assert is_free(PROCESS_STATE)
    other, another = prepared()
    with torch.no_grad(), other.guard(another) as guard:
        another(images())
        assert guard.looks == len(guard.watched)


def is_free(lock):
    """Return whether another thread could hold the lock."""
    found = []

    def ask():
        found.append(lock.acquire(blocking=False))
        if found[0]:
            lock.release()

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    return found[0]


def test_two_threads_that_serve_are_both_right():
    pipeline, model = prepared()
    batches = [images(size) for size in (12, 14, 16, 18)]
    with torch.no_grad():
        expected = [model(batch) for batch in batches]
    guard, wrong = pipeline.guard(model), []

    def serve(order):
        with torch.no_grad():
            same = [torch.equal(model(batches[index]), expected[index]) for index in order * 3]
            wrong.extend(
                index for index, is_same in zip(order * 3, same, strict=True) if not is_same
            )

    threads = [threading.Thread(target=serve, args=(o,)) for o in ([0, 1, 2, 3], [3, 2, 1, 0])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert guard.differences == []
    assert guard.looks == 4 * len(guard.watched)


# ------------------------------------------------------------------------------------------- its bounds


def test_what_is_not_looked_at_in_time_is_looked_at_in_later_calls():
    pipeline, model = prepared()
    with pipeline.guard(model, seconds=1e-9) as guard, torch.no_grad():
        model(images())
        assert guard.looks == 0
    with pipeline.guard(model, seconds=600.0) as guard, torch.no_grad():
        model(images())
        assert guard.looks == len(guard.watched)


def test_a_module_that_needs_too_much_memory_is_named():
    pipeline, model = prepared()
    with pipeline.guard(model, max_bytes=40_000) as guard, torch.no_grad():
        model(images())
    assert "it needs" in guard.left_out["0"]
    assert "left out  0: it needs" in repr(guard)


def test_the_sizes_of_a_workload_are_looked_at_in_advance():
    pipeline, model = prepared()
    batches = [images(16), images(24)]
    with torch.no_grad(), pipeline.guard(model, seconds=1e-9) as guard:
        guard.look(Workload(batches))
        assert guard.looks == 2 * len(guard.watched)
        for batch in batches:
            model(batch)
        assert guard.looks == 2 * len(guard.watched)
        add(model[6])
        with pytest.raises(GuardError, match="6: its outputs"):
            guard.look(images(32))


def test_a_first_call_in_serving_is_looked_at_whatever_the_share():
    pipeline, model = prepared(training=True)
    with pipeline.guard(model, every=1, share=1e-9) as guard:
        train(model, guard, 3)
        looks = guard.looks
        with torch.no_grad():
            model.eval()(images(24))
        assert guard.looks == looks + len(guard.watched)


def test_modules_have_their_turn_though_each_step_has_another_shape():
    pipeline, model = prepared(training=True)
    with pipeline.guard(model, every=16, share=ALL) as guard:
        looked_at = set()
        for size in range(12, 44):
            model(images(size)).mean().backward()
            looked_at |= {call.module for call, _, _ in guard._recorded}
    assert looked_at == set(guard.watched)


def test_each_shape_has_its_share_of_the_looks_in_training():
    pipeline, model = prepared(training=True)
    with pipeline.guard(model, every=16, share=ALL) as guard:
        for _ in range(16):
            train(model, guard, 1, images(16))
            train(model, guard, 1, images(20))
    assert sorted(key.looks for key in guard._turns.keys.values()) == [len(guard.watched)] * 2


def test_looks_in_training_take_their_share_of_the_time():
    pipeline, model = prepared(training=True)
    with pipeline.guard(model, every=1, share=1e-9) as guard:
        train(model, guard, 3)
        assert guard.looks == len(guard.watched)  # all of the first step, when no time was spent
    assert "in at most 1e-07 % of the time" in repr(guard)


def test_wrong_options_are_refused():
    pipeline, model = prepared()
    for options, text in {
        "on_difference": ("stop", "on_difference: 'stop' is not allowed"),
        "seconds": (0.0, "seconds: 0.0 is not above 0"),
        "max_bytes": (0, "max_bytes: 0 is not at least 1"),
        "share": (0.0, "share: 0.0 is not above 0"),
        "every": (0, "every: 0 is not at least 1"),
    }.items():
        with pytest.raises(RefusedError, match=text[1]):
            pipeline.guard(model, **{options: text[0]})
    assert len(model._forward_pre_hooks) == 1


def test_importing_the_guard_loads_no_torch():
    code = "import sys, prepare.guard; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "False\n"


@pytest.mark.slow
def test_a_fault_of_torch_itself_is_reduced_to_a_script(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.InstanceNorm2d(8), nn.SiLU(), nn.Conv2d(8, 4, 3))
    pipeline = Pipeline.from_config({"conv2d_memory_format": {}, "input_format": {"attach": True}})
    pipeline.apply(model, known_issues="ignore")
    with pipeline.guard(model, every=1, share=ALL, on_difference="warn", folder=tmp_path) as guard:
        train(model, guard, 2)
        assert guard.differences == []
        with pytest.warns(GuardWarning, match=r"1: its gradients are off by .*guard-1\.py"):
            train(model, guard, 1, images(12, samples=1))
    done = subprocess.run(
        [sys.executable, tmp_path / "guard-1.py"], capture_output=True, text=True, check=False
    )
    assert "AssertionError: input gradients: error" in done.stderr


IN_A_GROUP = """
import sys, torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from prepare.pipeline import Pipeline
distributed.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
def watched(steps, wrap):
    pipeline = Pipeline.from_config(steps)
    model = pipeline.apply(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 1)))
    wrapped, batch = wrap(model), torch.randn(2, 3, 8, 8)
    guard = pipeline.guard(model, every=1, share=1e9)
    for _ in range(2):
        wrapped(batch).square().mean().backward()
        guard()
    return guard
guard = watched({"conv2d_memory_format": {}}, DistributedDataParallel)
print(guard.looks, guard.left_out)
print(watched({"half": {"dtype": "bfloat16"}, "input_format": {"attach": True}}, fully_shard))
distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_a_guard_in_ddp_looks_and_with_fsdp_finds_drift_alone(tmp_path):
    run = [sys.executable, "-W", "ignore", "-c", IN_A_GROUP, tmp_path / "meeting"]
    lines = subprocess.check_output(run, text=True).splitlines()
    assert lines[0] == "6 {}"
    assert "it looks for drift alone" in lines[1]


def test_a_model_compiled_from_outside_is_not_looked_at():
    pipeline, model = prepared()
    guard = pipeline.guard(model)
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        compiled(images())
        assert guard.looks == 0
        model(images())
        assert guard.looks > 0
