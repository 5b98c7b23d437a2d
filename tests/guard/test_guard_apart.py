"""Test that a look leaves no trace: in backward, in transforms, with collectives, hooks and interrupts."""

import random
import signal
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import distributed, nn
from torch.func import functional_call, grad, jacrev, jvp, vmap
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import prepare.guard
from guarded import ALL, add, images, prepared, train
from prepare.errors import GuardError, GuardWarning
from prepare.guard import model_guard
from prepare.guard.apart import can_look
from prepare.pipeline import Pipeline
from prepare.testing.networks import facts

FLAT = {"conv2d_memory_format": {}}
FOLDER = str(Path(prepare.guard.__file__).parent)


def flat(*modules, training=False):
    """Return a pipeline and a model of these modules in channels-last."""
    pipeline = Pipeline.from_config(FLAT)
    return pipeline, pipeline.apply(nn.Sequential(*modules).train(training), known_issues="ignore")


def equal_layers(training):
    torch.manual_seed(0)
    convs = [nn.Conv2d(4, 4, 3, padding=1, bias=False) for _ in range(4)]
    return flat(*convs, training=training)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradients_of_a_checkpointed_model_are_those_without_a_guard(reentrant, training):
    def gradients(*, guarded):
        pipeline, model = equal_layers(training)
        guard = pipeline.guard(model, every=4, share=ALL) if guarded else lambda: None
        for _ in range(3):
            batch = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(1))
            batch = batch.contiguous(memory_format=torch.channels_last).requires_grad_()
            checkpoint(model, batch, use_reentrant=reentrant).square().mean().backward()
            guard()
        assert not guarded or guard.looks > 0
        return [parameter.grad for parameter in model.parameters()]

    plain, looked_at = gradients(guarded=False), gradients(guarded=True)
    assert all(map(torch.equal, plain, looked_at))


def test_transforms_of_a_guarded_model_work():
    pipeline, model = flat(nn.Conv2d(3, 4, 3), nn.ReLU())
    batch = images(8)
    weights = {name: tensor.detach() for name, tensor in model.named_parameters()}

    def results():
        return [
            vmap(lambda image: model(image[None]))(batch),
            grad(lambda w: functional_call(model, w, (batch,)).sum())(weights)["0.weight"],
            jacrev(model)(batch[:1]),
            jvp(model, (batch,), (torch.ones_like(batch),))[1],
        ]

    plain = results()
    with pipeline.guard(model) as guard:
        assert all(map(torch.equal, plain, results()))
        assert (guard.looks, guard.left_out) == (0, {})
        with torch.no_grad():
            model(batch)
        assert guard.looks == 2


def test_a_guarded_model_is_compiled_and_traced_whole():
    pipeline, model = flat(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 1))
    with torch.no_grad(), pipeline.guard(model) as guard:
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        expected = model(images(16))
        looks = guard.looks
        assert compiled(images(20)).shape[0] == len(expected)
        torch.jit.trace(model, images(24), check_trace=False)
        torch.fx.symbolic_trace(model)
        assert guard.looks == looks


@pytest.mark.parametrize("is_traced", [True, False])
def test_a_trace_is_seen_in_the_forms_of_two_versions(is_traced, monkeypatch):
    trace = torch.fx._symbolic_trace
    monkeypatch.delattr(trace, "_get_is_fx_tracing", raising=False)
    monkeypatch.setattr(trace, "_is_fx_tracing_flag", is_traced, raising=False)
    assert can_look([]) is not is_traced
    monkeypatch.delattr(trace, "_is_fx_tracing_flag")
    monkeypatch.setattr(trace, "_get_is_fx_tracing", lambda: is_traced, raising=False)
    assert can_look([]) is not is_traced


@pytest.mark.parametrize("make", [parametrizations.spectral_norm, nn.utils.spectral_norm])
def test_a_power_iteration_is_not_advanced(make):
    def losses(*, guarded):
        torch.manual_seed(0)
        pipeline, model = flat(make(nn.Conv2d(4, 4, 3)), nn.Conv2d(4, 2, 1), training=True)
        optimizer, found = torch.optim.SGD(model.parameters(), 0.1), []
        guard = (
            pipeline.guard(model, every=1, share=ALL, optimizer=optimizer)
            if guarded
            else lambda: None
        )
        for step in range(4):
            torch.manual_seed(step)
            loss = model(torch.randn(2, 4, 6, 6)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            guard()
            found.append(loss.item())
        assert not guarded or (guard.looks == 8 and guard.left_out == {})
        return found

    assert losses(guarded=True) == losses(guarded=False)


@pytest.mark.parametrize("training", [False, True])
def test_hooks_of_the_user_run_once_in_each_call(training):
    pipeline, model = flat(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 1), training=training)
    calls = []
    note = lambda name: lambda *_: calls.append(name)  # noqa: E731

    def register():
        return [
            model[0].register_forward_pre_hook(note("pre")),
            model[0].register_forward_hook(note("forward")),
            model[1].register_full_backward_hook(note("backward")),
            model[0].weight.register_hook(note("weight")),
            nn.modules.module.register_module_forward_hook(note("every module")),
        ]

    def run(guard):
        calls.clear()
        with torch.set_grad_enabled(training):
            output = model(images(8))
        if training:
            output.sum().backward()
        guard()
        return list(calls)

    handles = register()
    try:
        plain = run(lambda: None)
        with pipeline.guard(model, every=1, share=ALL) as guard:
            assert run(guard) == plain
            assert guard.looks == 2
            handles += register()  # hooks that come later run once, too
            expected = len(plain) * 2
            assert len(run(guard)) == expected
            model(images(10)) if not training else None
            assert guard.differences == []
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize("training", [False, True])
def test_a_hook_that_replaces_an_output_is_a_difference(training):
    pipeline, model = prepared(training=training)
    half = lambda _m, _a, out: 0.5 * out + 0.5 * out.detach()  # noqa: E731
    with pipeline.guard(model, every=1, share=ALL) as guard:
        model[6].register_forward_hook(half if training else lambda _m, _a, out: out * 1.01)
        with pytest.raises(GuardError, match="^6: "), torch.set_grad_enabled(training):
            train(model, guard, 1) if training else model(images())


class Stateful(nn.Module):
    """Counts its calls in a buffer, an attribute and a list, and adds them to its result."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)
        self.register_buffer("calls", torch.zeros(()))
        self.count, self.seen = 0, []

    def forward(self, x):
        self.calls += 1
        self.count += 1
        self.seen.append(self.count)
        return self.conv(x) + self.calls + self.count + len(self.seen)


def test_state_that_a_module_keeps_is_as_without_a_look():
    pipeline, model = flat(Stateful(), nn.BatchNorm2d(3))
    _, other = flat(Stateful(), nn.BatchNorm2d(3))
    other.load_state_dict(model.state_dict())
    with torch.no_grad(), pipeline.guard(model) as guard:
        for size in (8, 10, 8):
            assert torch.equal(model(images(size).fill_(0.5)), other(images(size).fill_(0.5)))
        before = facts(model), list(model[0].seen)
        guard.look(images(12))
        assert (facts(model), model[0].seen) == before
    assert (guard.differences, guard.left_out) == ([], {})
    assert guard.looks == 3 * len(guard.watched)
    assert (model[0].calls, model[0].count, model[0].seen) == (3, 3, [1, 2, 3])


def test_one_failure_does_not_end_the_watch_of_a_module(monkeypatch):
    pipeline, model = prepared()
    compare, failures = model_guard.difference, []

    def fails_once(*args, **options):
        if not failures:
            failures.append(RuntimeError("out of something"))
            raise failures[0]
        return compare(*args, **options)

    monkeypatch.setattr(model_guard, "difference", fails_once)
    with torch.no_grad(), pipeline.guard(model) as guard:
        model(images())
        assert list(guard.left_out.values()) == ["out of something"]
        model(images())
        assert guard.left_out == {}
        assert guard.looks == len(guard.watched)


def test_a_module_that_never_runs_alone_is_left_alone_at_that_key(monkeypatch):
    pipeline, model = prepared()
    tries = []

    def fails(record, *_args, **_options):
        tries.append(record.watched.name)
        raise SystemExit(3)

    monkeypatch.setattr(model_guard, "difference", fails)
    with torch.no_grad(), pipeline.guard(model) as guard:
        for _ in range(5):
            model(images())
    assert len(tries) == 3 * len(guard.watched)
    assert set(guard.left_out) == set(guard.watched)


class Gathers(nn.Module):
    """Sends a message to all processes."""

    def forward(self, x):
        mean = x.detach().mean((0, 2, 3))
        distributed.all_reduce(mean)
        return x - mean[:, None, None]


@pytest.mark.parametrize("training", [False, True])
def test_a_look_sends_no_message_to_other_processes(tmp_path, training, monkeypatch):
    sent = []
    distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1
    )
    try:
        pipeline, model = flat(nn.Conv2d(3, 4, 3), Gathers(), training=training)
        reduce = distributed.all_reduce

        def counted(tensor):
            reduce(tensor)
            sent.append(tensor)  # not after an error

        monkeypatch.setattr(distributed, "all_reduce", counted)
        with pipeline.guard(model, every=1, share=ALL) as guard, torch.set_grad_enabled(training):
            for size in (8, 10):
                output = model(images(size))
                output.sum().backward() if training else None
                guard()
        assert len(sent) == 2
        assert guard.left_out == {"1": "it communicates with other processes"}
        assert guard.looks == 2
    finally:
        distributed.destroy_process_group()


def traced(run, stop):
    """Run with a KeyboardInterrupt at line number `stop` of the guard; return the lines that were run."""
    lines = [0]

    def line(_frame, event, _arg):
        if event == "line":
            lines[0] += 1
            if lines[0] == stop:
                raise KeyboardInterrupt
        return line

    def call(frame, _event, _arg):
        return line if frame.f_code.co_filename.startswith(FOLDER) else None

    sys.settrace(call)
    try:
        run()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(None)
    return lines[0]


def surroundings(model):
    numbers = random.getstate(), torch.get_rng_state().tolist()
    modes = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.get_default_dtype()
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    return facts(model), numbers, modes, handlers, nn.Module.__call__


@pytest.mark.parametrize("training", [False, True])
def test_an_interrupt_at_any_line_of_a_look_leaves_no_trace(training):
    pipeline, model = flat(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), training=training)
    model[1].momentum = 0.0  # what the forward itself changes is not the question
    model[1].num_batches_tracked = None
    batch = images(4)
    guard = pipeline.guard(model, every=1, share=ALL)
    before = surroundings(model)

    def step():
        with torch.set_grad_enabled(training):
            output = model(batch)
        if training:
            output.sum().backward()
        guard()

    stop, is_stopped = 1, True
    while is_stopped:
        guard._hooked["0"].known.clear()
        guard._hooked["1"].known.clear()
        is_stopped = traced(step, stop) == stop
        model.zero_grad()
        assert surroundings(model) == before, f"at line {stop}"
        stop += 13
    assert stop > 300
    guard._hooked["0"].known.clear()
    looks = guard.looks
    step()
    assert guard.looks > looks
    assert guard.differences == []


def test_a_log_is_not_written_through_a_link(tmp_path):
    (tmp_path / "guard").mkdir()
    for name in ("guard.log", "guard-6.pt"):
        (tmp_path / "guard" / name).symlink_to(tmp_path / f"other-{name}")
    pipeline, model = prepared()
    guard = pipeline.guard(model, on_difference="warn", folder=tmp_path / "guard")
    add(model[6], 0.5)
    with torch.no_grad(), pytest.warns(GuardWarning):
        model(images())
    assert [path.name for path in tmp_path.iterdir()] == ["guard"]
    assert len(guard.differences) == 1
    assert not (tmp_path / "guard" / "guard-6.pt").is_symlink()


def test_four_threads_serve_one_model_as_without_a_guard():
    pipeline, model = prepared()
    batches = [images(size) for size in (12, 14, 16, 18)]
    with torch.no_grad():
        expected = [model(batch) for batch in batches]
    guard, wrong = pipeline.guard(model), []

    def serve(first):
        with torch.no_grad():
            order = [*range(first, 4), *range(first)] * 2
            wrong.extend(i for i in order if not torch.equal(model(batches[i]), expected[i]))

    threads = [threading.Thread(target=serve, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (wrong, guard.differences, guard.left_out) == ([], [], {})
    assert guard.looks == 4 * len(guard.watched)
    assert guard.running == {}


def test_looks_under_autocast_keep_its_cache_and_modes():
    pipeline, model = prepared(training=True)
    model[3].p = 0.0

    def gradients(guard):
        with torch.autocast("cpu", torch.bfloat16):
            loss = sum(model(images(16).fill_(0.3)).square().mean() for _ in range(2))
        loss.backward()
        guard()
        found = [parameter.grad.clone() for parameter in model.parameters()]
        model.zero_grad()
        return found

    plain = gradients(lambda: None)
    with pipeline.guard(model, every=1, share=ALL) as guard:
        assert all(map(torch.equal, plain, gradients(guard)))
    assert guard.looks > 0
    assert guard.differences == []
