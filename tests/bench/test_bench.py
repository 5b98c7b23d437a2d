"""The bench: rounds on a simulated clock, failures, restored models, refusals, memory and records."""

import copy
import functools
import json
import math
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from clocks import Clock, noisy
from prepare.bench import Comparison, Control, VariantResult, compare, peak_memory
from prepare.bench.input_pool import batch_size, make_pool
from prepare.bench.model_state import modules_in
from prepare.bench.samples import Series
from prepare.bench.session import _check_place
from prepare.bench.variant import Variant
from prepare.core.forward.example_input import Example
from prepare.core.forward.nested import arguments
from prepare.errors import BenchError, ConfigError, RefusedError
from prepare.pipeline import Pipeline
from prepare.report.sentences import control_text, seconds
from small_nets import bits

BATCH = torch.ones(4, 3)


# ------------------------------------------------------------------------------ rounds


def test_a_clock_that_stands_still_shows_no_difference():
    found = compare({"a": lambda x: x, "b": lambda x: x}, BATCH, _clock=lambda: 0.0)
    assert found.row("b").verdict == "no difference"
    assert found.row("a").throughput is None


def test_faster_slower_and_equal_variants_get_their_verdicts():
    clock = Clock()
    found = compare(
        {
            name: clock.takes(noisy(mean, 0.02, seed))
            for seed, (name, mean) in enumerate(
                {"plain": 0.1, "equal": 0.1, "quick": 0.08, "slow": 0.13}.items()
            )
        },
        BATCH,
        budget=200,
        _clock=clock,
    )
    words = {row.name: row.verdict for row in found.rows}
    assert words == {
        "plain": "baseline",
        "equal": "no difference",
        "quick": "faster",
        "slow": "slower",
    }
    quick = found.row("quick")
    assert quick.ratio == pytest.approx(0.8, rel=0.03)
    assert quick.ratio_interval[0] < 0.8 < quick.ratio_interval[1]
    assert quick.seconds_interval[0] <= quick.seconds <= quick.seconds_interval[1]
    assert quick.throughput == pytest.approx(4 / quick.seconds)
    assert len(quick.samples) == found.repeats
    assert found.aa.interval[0] <= 1 <= found.aa.interval[1]
    assert found.settings["confidence_of_each"] == pytest.approx(1 - 0.05 / 3)


def test_a_round_runs_all_variants_and_the_baseline_twice_shuffled():
    clock, log = Clock(), []
    names = ("plain", "other")
    found = compare(
        {name: clock.takes(0.1, log=log, name=name) for name in names},
        BATCH,
        budget=5.0,
        precision=1e-9,
        baseline="other",
        _clock=clock,
    )
    turns = log[len(names) * 3 :]
    rounds = [tuple(turns[start : start + 3]) for start in range(0, len(turns), 3)]
    assert all(sorted(each) == ["other", "other", "plain"] for each in rounds)
    assert len({*rounds}) > 1
    assert len(rounds) == found.repeats
    assert (found.baseline, found.row("other").ratio, found.row("plain").ratio) == ("other", 1, 1)


def test_the_same_seed_gives_the_same_order():
    def order(seed):
        clock, log = Clock(), []
        variants = {name: clock.takes(0.1, log=log, name=name) for name in "abc"}
        compare(variants, BATCH, budget=9, seed=seed, _clock=clock)
        return log

    assert order(1) == order(1) != order(2)


@pytest.mark.parametrize("budget", [3.0, 10.0])
def test_the_budget_is_kept(budget):
    clock = Clock()
    variants = {name: clock.takes(noisy(0.1, 0.5, name)) for name in "ab"}
    found = compare(variants, BATCH, budget=budget, precision=1e-6, _clock=clock)
    assert found.seconds == clock.now
    # A round is begun if one as long as the last would still end in time.
    assert budget - 1.5 < found.seconds < budget + 1.0


def test_a_round_that_would_exceed_the_budget_is_not_started():
    clock = Clock()
    variants = {name: clock.takes(0.125) for name in "ab"}
    # 0.75 s of warming up, and rounds of 0.375 s.
    found = compare(variants, BATCH, budget=2.0, precision=1e-9, _clock=clock)
    assert (found.repeats, found.seconds) == (3, 1.875)


def test_a_tiny_budget_runs_one_round_and_notes_it_is_too_few():
    clock = Clock()
    found = compare({name: clock.takes(10.0) for name in "ab"}, BATCH, budget=0.1, _clock=clock)
    assert found.repeats == 1
    row = found.row("b")
    assert (row.seconds, row.ratio, row.ratio_interval) == (10.0, 1.0, None)
    assert (row.verdict, found.aa) == (
        "unclear",
        Control(ratio=1.0, interval=None, noise=None),
    )
    assert row.reason.startswith("too few rounds, 1 of at least 6")
    assert found.notes[0] == (
        "too few rounds to conclude anything: 1 round, and an interval needs 6; give it more time"
    )


def test_the_bench_stops_when_the_ratios_are_precise():
    def rounds(precision):
        clock = Clock()
        variants = {name: clock.takes(noisy(0.1, 0.05, name)) for name in "ab"}
        return compare(variants, BATCH, budget=100, precision=precision, _clock=clock)

    wide, narrow, never = rounds(0.5), rounds(0.02), rounds(0.0001)
    assert wide.repeats == 20
    assert wide.repeats < narrow.repeats < never.repeats
    low, high = narrow.row("b").ratio_interval
    assert (high - low) / 2 / narrow.row("b").ratio <= 0.02
    assert any("are known to" in note for note in never.notes)
    assert not any("are known to" in note for note in narrow.notes)


def test_short_calls_are_timed_in_a_row_after_an_untimed_one():
    clock, log = Clock(), []
    variants = {
        "short": clock.takes(0.001, log=log, name="short"),
        "long": clock.takes(0.02, log=log, name="long"),
    }
    found = compare(variants, BATCH, budget=60, _clock=clock)
    assert (found.row("short").calls, found.row("long").calls) == (5, 5)
    assert found.row("short").seconds == pytest.approx(0.001)
    assert found.settings["untimed_call_first"] is True
    assert log.count("long") == 3 + found.repeats * (1 + 5)
    assert log.count("short") == 3 + 2 * found.repeats * (1 + 5)


def test_the_untimed_call_is_left_out_when_time_is_short():
    clock, log = Clock(), []
    variants = {name: clock.takes(1.0, log=log, name=name) for name in "ab"}
    found = compare(variants, BATCH, budget=50, _clock=clock)
    assert found.settings["untimed_call_first"] is False
    assert log.count("b") == 3 + found.repeats
    assert any("no untimed call" in note for note in found.notes)


@pytest.mark.skipif(peak_memory.resource is None, reason="this system does not count pages")
def test_time_spent_on_fresh_memory_is_reported():
    def heavy(x):  # so large that every C library gives it back at once
        return torch.ones(10**7)

    page_by_page = peak_memory.page_faults()
    heavy(None)
    if peak_memory.page_faults() - page_by_page < 5_000:
        pytest.skip("this system gives huge pages")
    found = compare({"heavy": heavy, "light": lambda x: x}, BATCH, budget=0.8)
    assert found.settings["fresh_memory"] >= 0.1
    assert any("is spent on memory that each call returns" in note for note in found.notes)
    found = compare({"light": lambda x: x}, BATCH, budget=0.2)
    assert found.settings["fresh_memory"] == 0.0
    assert not any("memory" in note for note in found.notes)


@pytest.mark.skipif(peak_memory.resource is None, reason="this system does not count pages")
def test_the_cost_of_a_page_fault_is_measured():
    assert 1e-8 < peak_memory.seconds_per_page_fault() < 1e-3


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="settings of glibc")
def test_documented_malloc_settings_keep_memory_in_the_process():
    code = """if True:
        import torch
        from prepare.bench.peak_memory import page_faults
        def work(times):
            for _ in range(times):
                torch.ones(10**7)
        work(20)  # what is kept is soon as large as it has to be
        before = page_faults()
        work(5)
        print(page_faults() - before)"""
    root = Path(__file__).parents[2]
    line = re.search(
        r"^((?:MALLOC_\w+=\d+ )+)python", (root / "docs/timing.md").read_text(), re.MULTILINE
    )
    settings = dict(word.split("=") for word in line[1].split())

    def started(**more):
        env = {key: value for key, value in os.environ.items() if not key.startswith("MALLOC_")}
        return subprocess.Popen(
            [sys.executable, "-c", code], env=env | more, cwd=root, stdout=subprocess.PIPE
        )

    def pages(process):
        output, _ = process.communicate()
        assert process.returncode == 0
        return int(output)

    plain, tuned = started(), started(**settings)  # at once: most of it is the import of torch
    without, with_settings = pages(plain), pages(tuned)
    if without < 25_000:
        pytest.skip("this system gives huge pages")
    assert with_settings < without / 2


def test_progress_is_reported():
    clock, told = Clock(), []
    variants = {name: clock.takes(0.1) for name in "ab"}
    found = compare(variants, BATCH, budget=30, progress=told.append, _clock=clock)
    assert [each.doing for each in told[:3]] == ["warming up a", "warming up b", "timing"]
    assert (told[0].precision, told[-1].precision) == (None, 0.0)
    assert (told[-1].rounds, told[-1].budget) == (found.repeats, 30)


# ------------------------------------------------------------------------------ failures


@pytest.mark.parametrize("breaks_at", [0, 1, 2, 5])
def test_a_failing_variant_is_reported_and_the_others_continue(breaks_at):
    clock = Clock()
    variants = {name: clock.takes(0.1) for name in ("plain", "other")}
    variants["broken"] = clock.takes(0.1, breaks_at=breaks_at)
    found = compare(variants, BATCH, _clock=clock)
    assert found.row("broken") == VariantResult(
        name="broken", verdict="failed", device="cpu", reason="MemoryError: no more"
    )
    assert found.row("other").verdict == "no difference"
    assert found.repeats >= 20


@pytest.mark.parametrize("breaks_at", [0, 7, 8])
def test_variants_are_timed_but_not_compared_if_the_baseline_fails(breaks_at):
    clock = Clock()
    found = compare(
        {"plain": clock.takes(0.1, breaks_at=breaks_at), "other": clock.takes(noisy(0.2, 0.01, 0))},
        BATCH,
        budget=100,
        _clock=clock,
    )
    assert [row.verdict for row in found.rows] == ["failed", "not compared"]
    other = found.row("other")
    assert other.seconds == pytest.approx(0.2, rel=0.02)
    assert (other.ratio, found.aa) == (None, None)


@pytest.mark.parametrize("last", range(1, 12))
def test_a_variant_that_failed_is_not_called_again(last):
    clock, calls = Clock(), []

    def breaks(x):
        calls.append(x)
        clock.now += 0.1
        if len(calls) == last:
            raise MemoryError

    compare({"plain": breaks, "other": clock.takes(0.1)}, BATCH, budget=5, _clock=clock)
    assert len(calls) == last


def test_the_bench_ends_when_every_variant_has_failed():
    found = compare({"a": Clock().takes(0, breaks_at=0)}, BATCH)
    assert (found.repeats, found.row("a").verdict, found.notes) == (0, "failed", ())


def test_a_failure_in_a_model_names_the_module_and_a_likely_cause():
    model = nn.Sequential(nn.Conv2d(3, 4, 1))
    found = compare({"a": nn.Identity(), "b": model}, torch.ones(1, 2, 4, 4), budget=0.2)
    assert found.row("b").reason.startswith("forward of 0 (Conv2d): RuntimeError: Given groups=1")
    assert found.row("b").reason.endswith("the example input may not fit this model")


def test_a_failure_in_the_formatter_is_named():
    def bad(batch):
        raise ValueError("odd")

    found = compare({"a": nn.Identity()}, BATCH, format={"a": bad}, budget=0.2)
    assert found.row("a").reason == "its format: raised ValueError: odd"


def test_models_on_meta_or_without_gradients_fail_with_a_reason():
    found = compare({"a": nn.Linear(3, 3, device="meta")}, BATCH, budget=0.2)
    assert found.row("a").reason.startswith("its device: meta computes nothing")
    found = compare({"a": nn.Linear(3, 3).requires_grad_(False)}, BATCH, train=True, budget=0.2)
    assert (
        found.row("a").reason == "its output: does not require gradients; there is nothing to train"
    )


def test_an_interrupt_ends_the_bench_and_restores_the_model():
    model = nn.BatchNorm1d(3)

    def interrupted(progress):
        if progress.rounds:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compare({"a": model}, BATCH, train=True, progress=interrupted)
    assert int(model.num_batches_tracked) == 0


# ------------------------------------------------------------------------------ models


class Awkward(nn.Module):
    """Writes wherever a forward can: buffers, parameters, attributes, its input, random states."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 3, max_norm=0.1)
        self.norm = nn.BatchNorm1d(3)
        self.drop = nn.Dropout()
        self.frozen = nn.BatchNorm1d(3).eval()
        self.scale = nn.Parameter(torch.ones(3))
        self.register_buffer("count", torch.zeros(()))
        self.loose, self.seen, self.last = torch.zeros(2), [], None

    def forward(self, x):
        x.mul_(2)
        self.count = self.count + 1
        self.loose += 1
        self.seen.append(1)
        self.scale.data = self.scale.data * 2
        self.last = self.drop(self.norm(self.frozen(x + self.embed(torch.arange(4)))))
        return self.last * self.scale


def state(model):
    found = {name: bits(tensor.detach()) for name, tensor in model.state_dict().items()}
    found |= {f"{n}:id": (id(t), t.data_ptr()) for n, t in model.named_parameters()}
    found |= {f"{n}:grad": (id(t.grad), bits(t.grad)) for n, t in model.named_parameters()}
    found |= {f"{n}:mode": m.training for n, m in model.named_modules()}
    found |= {"loose": bits(model.loose), "seen": list(model.seen), "last": model.last}
    return found | {"hooks": list(model._forward_hooks), "random": bits(torch.get_rng_state())}


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("wrapped", [False, True])
def test_the_bench_restores_the_model(train, wrapped):
    model = Awkward().train()
    model.frozen.eval()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    model.register_forward_hook(lambda *_: None)
    batch = torch.randn(4, 3)
    before, given = state(model), bits(batch)
    call = functools.partial(lambda net, x: net(x), model) if wrapped else model
    found = compare({"a": call}, batch, train=train, budget=0.3)
    assert found.row("a").verdict == "baseline", found.row("a").reason
    assert state(model) == before
    assert bits(batch) == given


def test_training_runs_forward_and_backward_with_random_gradients():
    seen = []

    class Net(nn.Linear):
        def forward(self, x):
            seen.append((self.training, torch.is_grad_enabled(), self.weight.grad is None))
            return super().forward(x)

    model, gradients = Net(3, 3), []
    model.weight.register_hook(gradients.append)
    compare({"a": model}, BATCH, train=True, budget=0.2)
    assert {*seen} == {(True, True, True)}
    assert len(gradients) == len(seen)
    # Random ones: a constant gradient vanishes in a norm, and makes slow, denormal numbers.
    assert gradients[0].unique().numel() > 1
    seen.clear()
    compare({"a": model}, BATCH, budget=0.2)
    assert {*seen} == {(False, False, True)}
    assert model.training


def test_training_keeps_the_mode_of_frozen_submodules():
    model, modes = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3).eval()), []
    model[1].register_forward_hook(lambda module, *_: modes.append(module.training))
    compare({"a": model}, BATCH, train=True, budget=0.2)
    assert {*modes} == {False}


def test_each_variant_gets_the_input_its_pipeline_formats():
    seen = {"plain": set(), "half": set()}
    model = nn.Conv2d(3, 4, 3)
    pipeline = Pipeline.from_config(
        {"half": {"dtype": "bfloat16"}, "conv2d_memory_format": {}, "input_format": {}}
    )
    half = pipeline.apply(copy.deepcopy(model))
    for name, net in {"plain": model, "half": half}.items():
        net.register_forward_pre_hook(
            lambda _, args, name=name: seen[name].add((args[0].dtype, args[0].stride()))
        )
    found = compare(
        {"plain": model, "half": half},
        torch.randn(2, 3, 8, 8),
        format={"half": pipeline.format},
        budget=0.3,
    )
    assert seen == {
        "plain": {(torch.float32, (192, 64, 8, 1))},
        "half": {(torch.bfloat16, (192, 1, 24, 3))},
    }
    assert "failed" not in {row.verdict for row in found.rows}


def test_inputs_differ_between_rounds_and_are_equal_within_one():
    clock, seen = Clock(), {"a": [], "b": []}

    def variant(name):
        def call(x):
            seen[name].append(bits(x))
            x.zero_()  # may write into its input, and spoils it for nobody
            clock.now += 0.1

        return call

    compare({name: variant(name) for name in "ab"}, torch.randn(4, 3), budget=6, _clock=clock)
    assert len({*seen["b"]}) > 4
    assert {*seen["a"]} == {*seen["b"]}


def test_an_input_pool_keeps_values_strides_indices_and_names():
    batch = {
        "image": torch.randn(2, 4, 4, 4).to(memory_format=torch.channels_last),
        "index": torch.arange(6),
        "wide": torch.randn(1, 3).expand(5, 3),
        "flag": True,
    }
    pool = make_pool(batch, seed=0)
    assert len(pool) == 8
    for each in pool:
        assert each["image"].stride() == batch["image"].stride()
        assert torch.equal(each["image"].flatten().sort()[0], batch["image"].flatten().sort()[0])
        assert torch.equal(each["index"], batch["index"])
        assert torch.equal(each["wide"], batch["wide"])
        assert each["flag"] is True
    assert not torch.equal(pool[0]["image"], pool[1]["image"])
    assert bits(make_pool(batch, seed=0)[3]["image"]) == bits(pool[3]["image"])


def test_large_batches_have_small_pools_and_functions_fill_theirs():
    made = []

    def draw():
        made.append(torch.full((2,), float(len(made))))
        return made[-1]

    assert [float(each[0]) for each in make_pool(draw, seed=0)] == [0, 1, 2, 3, 4, 5, 6, 7]
    assert len(make_pool(torch.empty(2**27, dtype=torch.uint8, device="meta"), seed=0)) == 2


@pytest.mark.parametrize(
    ("batch", "given", "size"),
    [
        (BATCH, ((BATCH,), {}), 4),
        ((BATCH, 2), ((BATCH, 2), {}), 4),
        ({"x": BATCH}, ((), {"x": BATCH}), 4),
        (Example((1,), {"x": BATCH}), ((1,), {"x": BATCH}), 4),
        (torch.tensor(1.0), ((torch.tensor(1.0),), {}), None),
    ],
)
def test_a_batch_becomes_the_arguments_of_the_call(batch, given, size):
    assert str(arguments(batch)) == str(given)
    assert batch_size(batch) == size


def test_the_models_behind_functions_are_found():
    net, other = nn.Linear(3, 3), nn.Linear(3, 3)

    class Holder:
        def __init__(self):
            self.net = net

        def __call__(self, x):
            return self.net(x)

        def method(self, x):
            return self.net(x)

    def calls_another(x):
        return (lambda y: net(other(y)))(x)

    assert modules_in(net) == [net]
    assert modules_in(lambda x: net(x)) == [net]
    assert modules_in(functools.partial(lambda a, x: a(x), net)) == [net]
    assert modules_in(net.forward) == [net]
    assert modules_in(Holder()) == [net]
    assert modules_in(Holder().method) == [net]
    assert modules_in(lambda x: [each(x) for each in nets]) == []
    nets = [net, other]
    assert modules_in(lambda x: [each(x) for each in nets]) == [net, other]
    assert {*modules_in(calls_another)} == {net, other}


# ------------------------------------------------------------------------------ refusals


def test_the_same_model_as_two_variants_is_refused():
    model = nn.Sequential(nn.Conv2d(3, 4, 3))
    one = Pipeline.from_config({"conv2d_memory_format": {}}).apply(model)
    with pytest.raises(RefusedError) as raised:
        compare({"one": one, "other": model}, torch.ones(1, 3, 8, 8))
    assert str(raised.value) == (
        "variants 'one' and 'other': they are the same model: preparing one changes the other; "
        "build the model once for each, or copy.deepcopy it before it is prepared; "
        "to call one model in two ways, give a function for each"
    )


def test_models_that_share_a_tensor_are_refused_functions_are_not():
    model = nn.Linear(3, 3)
    shares = nn.Sequential(nn.Linear(3, 3))
    shares[0].weight.data = model.weight.data[:]
    with pytest.raises(RefusedError, match=r"share the tensor weight: preparing"):
        compare({"one": model, "other": shares}, BATCH)
    found = compare({"one": lambda x: model(x), "other": model}, BATCH, budget=0.2)
    assert "failed" not in {row.verdict for row in found.rows}


def test_a_lazy_model_is_refused():
    with pytest.raises(RefusedError, match=r"'a': the parameter weight has no shape yet; run one"):
        compare({"a": nn.LazyLinear(3)}, BATCH)


def test_all_invalid_names_and_numbers_are_reported_at_once():
    with pytest.raises(ConfigError) as raised:
        compare(
            {"plain": nn.Identity()},
            BATCH,
            baseline="plane",
            budget=0,
            precision=2.0,
            confidence=math.nan,
            format={"x": copy.copy},
        )
    assert str(raised.value).splitlines() == [
        "baseline: 'plane' is not a variant; did you mean 'plain'? variants: plain",
        "format: 'x' is not a variant; variants: plain",
        "budget: 0 is not between 0 and inf; give seconds, as in 20",
        "precision: 2.0 is not between 0 and 1; give a fraction of the ratio, as in 0.02",
        "confidence: nan is not between 0 and 1; give a probability, as in 0.95",
    ]
    with pytest.raises(ConfigError, match="variants: the mapping is empty; give"):
        compare({}, BATCH)


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a device that is not there")
def test_a_missing_device_is_refused_without_fallback():
    with pytest.raises(RefusedError, match=r"device: cuda cannot be used here: .*; run it on"):
        compare({"a": nn.Identity()}, BATCH, device="cuda")


def test_a_variant_on_another_device_than_required_fails():
    lies_there = Series(
        Variant("a", nn.Identity(), formatter=None, train=False), torch.device("cuda:0")
    )
    for device in ("cpu", "cuda:1"):
        with pytest.raises(RefusedError, match=f"it is on cuda:0, not on {device}; move it there"):
            _check_place(lies_there, device)
    _check_place(lies_there, "cuda")
    found = compare({"a": nn.Identity()}, torch.ones(2, device="meta"), device="cpu", budget=0.2)
    assert found.row("a").verdict == "failed"
    assert compare({"a": nn.Identity()}, BATCH, device="cpu", budget=0.2).row("a").device == "cpu"


def test_cuda_is_timed_by_events_between_synchronisations(monkeypatch):
    happened = []

    class Event:
        def __init__(self, *, enable_timing):
            self.timing = enable_timing

        def record(self):
            happened.append("record")

        def synchronize(self):
            happened.append("wait")

        def elapsed_time(self, end):
            assert self.timing
            assert end is not self
            return 30.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.no_grad())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: happened.append("idle"))
    variant = Variant("a", lambda x: happened.append("call"), formatter=None, train=False)
    took = variant.timed(
        BATCH, calls=3, warm=False, device=torch.device("cuda"), clock=lambda: 1 / 0
    )
    assert took == pytest.approx(0.01)  # 30 ms, three calls
    assert happened == ["idle", "record", "call", "call", "call", "record", "wait"]


# ------------------------------------------------------------------------------ memory


@pytest.mark.skipif(sys.platform != "linux", reason="VmHWM is Linux's")
def test_peak_memory_is_that_of_the_call_alone():
    there = torch.ones(2**23)  # 32 MiB, resident before

    def work():
        for _ in range(3):
            torch.ones(2**24).sum()  # 64 MiB, given back each time

    found, how = peak_memory.measure_peak(work, torch.device("cpu"))
    assert how == "VmHWM of the process"
    assert 56 * 2**20 < found < 80 * 2**20
    assert there[0] == 1


@pytest.mark.skipif(sys.platform != "linux", reason="VmHWM is Linux's")
def test_peak_memory_includes_memory_from_the_reserve():
    # 18 activations of 0.5 MiB wait for backward; the C library keeps such blocks once they are freed.
    parts = (nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
    net = nn.Sequential(*(copy.deepcopy(part) for _ in range(6) for part in parts))
    variant = Variant("a", net, formatter=None, train=True)
    batch = torch.randn(2, 16, 64, 64)
    found = [variant.peak(batch, torch.device("cpu"))[0] for _ in range(3)]
    assert min(found) > 7 * 2**20


def test_peak_memory_is_none_where_the_system_hides_it(monkeypatch, tmp_path):
    monkeypatch.setattr(peak_memory, "_CLEAR_REFS", tmp_path / "no" / "clear_refs")
    found = compare({"a": nn.Identity()}, BATCH, budget=0.2)
    assert (found.row("a").peak_bytes, found.settings["memory"]) == (None, None)


# ------------------------------------------------------------------------------ records and report


@pytest.fixture(scope="module")
def found():
    clock = Clock()
    variants = {
        name: clock.takes(noisy(mean, 0.01, name))
        for name, mean in {"plain": 0.1, "quick": 0.05, "same": 0.1}.items()
    }
    variants["broken"] = clock.takes(0.1, breaks_at=1)
    return compare(variants, BATCH, budget=60, _clock=clock)


def test_a_comparison_survives_saving_and_loading(found, tmp_path):
    found.save(tmp_path / "bench.json")
    assert Comparison.load(tmp_path / "bench.json") == found
    data = json.loads((tmp_path / "bench.json").read_text())
    assert (data["format"], data["version"]) == ("prepare.bench", 1)
    (case,) = data["cases"]
    assert case["what"] == "inference"
    assert case["comparison"]["environment"]["threads"] == torch.get_num_threads()
    known = {"threads", "cores_available", "load_before", "others", "stolen", "held_back", "seed"}
    assert known <= case["comparison"]["settings"].keys()


def COMPARED(change):
    """The same file with something else in its comparison."""
    return lambda data: {
        "cases": [case | {"comparison": case["comparison"] | change} for case in data["cases"]]
    }


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({"format": "prepare.flow"}, "this is a prepare.flow, not a prepare.bench"),
        ({"version": 2}, "version 2 is not known here; this prepare reads version 1"),
        ({"cases": []}, "this is not a bench: ValueError: it has no cases"),
        ({"cases": [{"what": "a"}]}, "this is not a bench: ValueError: the keys are ['what']"),
        ({"cases": None}, "this is not a bench: TypeError"),
        (
            COMPARED({"rows": [{"name": "a"}]}),
            "this is not a bench: ValueError: the keys are ['name']",
        ),
        (COMPARED({"rows": None}), "this is not a bench: TypeError"),
        (COMPARED({"aa": {}}), "this is not a bench: ValueError: the keys are []"),
    ],
)
def test_a_file_that_is_not_a_bench_is_refused_with_the_reason(found, tmp_path, change, wrong):
    path = tmp_path / "bench.json"
    found.save(path)
    data = json.loads(path.read_text())
    path.write_text(json.dumps(data | (change(data) if callable(change) else change)))
    with pytest.raises(BenchError) as raised:
        Comparison.load(path)
    assert str(raised.value).startswith(f"{path}: {wrong}")
    path.write_text(path.read_text().replace('"faster"', '"best"')[:-3])
    with pytest.raises(BenchError, match="this is not a bench"):
        Comparison.load(path)


def test_an_unknown_verdict_is_refused(found, tmp_path):
    path = tmp_path / "bench.json"
    found.save(path)
    path.write_text(path.read_text().replace('"faster"', '"best"'))
    with pytest.raises(BenchError, match="'best' is not a verdict"):
        Comparison.load(path)


def test_the_control_names_the_ratio_and_the_noise(found):
    assert re.fullmatch(
        r"; the baseline against itself: differences below \d+\.\d % are noise",
        control_text(found.aa),
    )


def test_a_failed_baseline_has_no_control():
    clock = Clock()
    broken = {"a": clock.takes(0.1, breaks_at=0), "b": clock.takes(0.1)}
    comparison = compare(broken, BATCH, train=False, _clock=clock)
    assert control_text(comparison.aa) == "; the baseline failed, so nothing was compared"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (123.4, "123 s"),
        (1.234, "1.23 s"),
        (0.9999, "1.00 s"),
        (0.0456, "45.6 ms"),
        (2e-6, "2.00 us"),
    ],
)
def test_times_are_shown_with_three_digits(value, text):
    assert seconds(value) == text


def test_a_saved_bench_is_read_and_described_without_torch(found, tmp_path):
    found.save(tmp_path / "bench.json")
    code = (
        "import sys; from prepare.bench.records import Case, Comparison; "
        "from prepare.report.sentences import case_sentence; "
        f"comparison = Comparison.load({str(tmp_path / 'bench.json')!r}); "
        "print(case_sentence(Case(what='inference', comparison=comparison)), 'torch' in sys.modules)"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root)
    assert done.stderr == ""
    assert re.fullmatch(r"inference: 2\.0x faster \(50 % less time, .*\): .* False\n", done.stdout)


# ------------------------------------------------------------------------------ autocast


class Seen(nn.Module):
    """Notes the dtype of its layer's output in each call."""

    def __init__(self, note=lambda dtype: None):
        super().__init__()
        self.layer, self.note = nn.Linear(3, 3), note

    def forward(self, x):
        x = self.layer(x)
        self.note(x.dtype)
        return x


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("amp", ["bfloat16", "float16"])
def test_every_forward_is_timed_under_the_autocast(amp, train):
    seen = {"a": set(), "b": set()}
    models = {name: Seen(dtypes.add) for name, dtypes in seen.items()}
    found = compare(models, BATCH, amp=amp, train=train, budget=0.05)
    assert found.settings["amp"] == amp
    assert seen["a"] == seen["b"] == {getattr(torch, amp)}
    assert found.row("b").ratio


def test_without_amp_a_surrounding_autocast_is_off_while_timing():
    seen = set()
    with torch.autocast("cpu", torch.bfloat16):
        compare({"a": Seen(seen.add)}, BATCH, budget=0.05)
    assert seen == {torch.float32}


def test_a_float16_step_scales_the_loss_and_unscales_the_gradients(monkeypatch):
    steps = []
    unscale = torch.amp.GradScaler.unscale_

    def spied(scaler, optimizer):
        (group,) = optimizer.param_groups
        before = group["params"][0].grad.clone()
        unscale(scaler, optimizer)
        steps.append((before / group["params"][0].grad).nanmean())

    monkeypatch.setattr(torch.amp.GradScaler, "unscale_", spied)
    compare({"a": Seen()}, BATCH, amp="float16", train=True, budget=0.05)
    assert steps[-1] > 100


def test_an_unknown_amp_is_refused_before_anything_is_timed():
    with pytest.raises(RefusedError, match="amp: 'fp16' is not allowed"):
        compare({"a": Seen()}, BATCH, amp="fp16")
