"""The key bench: its levels and limits, and a run that times its model."""

import copy
import itertools
import re
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import made
from clocks import Clock
from made import ran
from made_works import settings, work
from page_reader import Reader
from prepare.app.job import build_model, run_stages
from prepare.app.report.terminal import stage
from prepare.core.forward.example_input import Example
from prepare.errors import RefusedError
from prepare.pipeline import Pipeline
from prepare.stages.bench import compare
from prepare.stages.bench import time_prepared as levels
from prepare.stages.bench.document import speed_sentence
from prepare.stages.bench.records import INFERENCE, TRAINING, Comparison
from prepare.stages.bench.time_prepared import time_models
from prepare.stages.registry import STAGES
from prepare.stages.verify.records import unknown
from small_nets import bits

pytestmark = pytest.mark.usefixtures("quick")


def net():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1)).eval()


def models(steps=None, model=None, **options):
    unprepared = model or net()
    pipeline = Pipeline.from_config(steps or {"conv2d_memory_format": {}})
    prepared = pipeline.apply(copy.deepcopy(unprepared), known_issues="ignore")
    found = {"unprepared": unprepared, "prepared": prepared, "pipeline": pipeline} | options
    return SimpleNamespace(**found)


def values_of(model):
    return {name: bits(tensor) for name, tensor in model.state_dict().items()}


def example(batch=2):
    return Example((torch.randn(batch, 3, 8, 8),))


def timed(found=None, given=None, *, level="short", mode="eval", **more):
    them = vars(found or models()).values()
    return time_models(*them, given or example(), level=level, mode=mode, **more)


@pytest.mark.parametrize(("mode", "what"), [("eval", INFERENCE), ("train", TRAINING)])
def test_short_times_the_step_of_the_mode(mode, what):
    found = timed(mode=mode)
    assert found.what == what
    assert [row.name for row in found.rows] == ["unprepared", "prepared"]
    assert found.baseline == "unprepared"
    assert found.headline == found.row("prepared")


def test_each_model_gets_the_batch_its_pipeline_formats():
    seen = {}

    class Watched(nn.Conv2d):
        def forward(self, x):
            seen.setdefault(self.weight.dtype, set()).add((x.dtype, x.stride()[1]))
            return super().forward(x)

    steps = {"half": {"dtype": "bfloat16"}, "conv2d_memory_format": {}}
    timed(models(steps, Watched(3, 4, 3)))
    assert seen == {torch.float32: {(torch.float32, 64)}, torch.bfloat16: {(torch.bfloat16, 64)}}
    seen.clear()
    timed(models(steps | {"input_format": {}}, Watched(3, 4, 3)))
    assert seen == {torch.float32: {(torch.float32, 64)}, torch.bfloat16: {(torch.bfloat16, 1)}}


SWEEP = "-m precision=float32,bfloat16"


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["precision=bfloat16"], True),
        (["precision=float32"], False),
        (["precision=bfloat16", "memfmt=contiguous"], False),
        # A sweep over the group would leave the step in each row.
        (["+steps.half.dtype=bfloat16"], False),
    ],
    ids=str,
)
def test_precision_and_layout_name_the_sweep_that_tells_them_apart(
    words, named, tmp_path, monkeypatch, capsys
):
    code, out, folder = ran(tmp_path, monkeypatch, capsys, *words)
    assert code == 0
    assert (SWEEP in " ".join(out.split())) is named
    if named:
        compared = Comparison.load(folder / "bench.json")
        assert [row.name for row in compared.rows] == ["unprepared", "prepared"]


@pytest.mark.slow
def test_the_sweep_that_is_named_has_a_row_of_the_layout_alone(tmp_path, monkeypatch, capsys):
    words = ("bench=none", "isolate=false", *SWEEP.split(), "hydra.sweep.dir=s")
    code, out, _ = ran(tmp_path, monkeypatch, capsys, *words)
    assert (code, "2 of 2 rows ok" in out) == (0, True)
    recipes = [path.read_text() for path in sorted(tmp_path.glob("s/*/recipe.yaml"))]
    assert ["conv2d_memory_format" in each for each in recipes] == [True, True]
    assert ["bfloat16" in each for each in recipes] == [False, True]


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_timing_restores_both_models(mode):
    found = models()
    kept = [(model, values_of(model)) for model in (found.unprepared, found.prepared)]
    timed(found, mode=mode, level="full")
    for model, values in kept:  # the rest is that of `compare`
        assert values_of(model) == values
    assert not found.pipeline.plan(found.prepared)


def test_the_unprepared_model_is_only_moved_to_the_device(monkeypatch):
    steps = {"device": {"device": "cpu"}, "half": {}, "conv2d_memory_format": {}}
    found = models(steps)
    applied = []
    apply = Pipeline.apply
    monkeypatch.setattr(
        Pipeline,
        "apply",
        lambda self, model, **more: applied.append((self.to_config(), model)) or apply(self, model, **more),
    )  # fmt: skip
    before = values_of(found.unprepared)
    timed(found)
    own = [each for each in applied if each[1] is found.unprepared]
    assert own == [({"device": {"device": "cpu"}}, found.unprepared)]
    assert values_of(found.unprepared) == before


def test_what_is_not_compared_has_a_reason():
    no_example = time_models(*vars(models()).values(), None, level="short", mode="eval")
    reasons = {
        "there is no example input": no_example,
        "no copy of it": timed(models(unprepared="no copy of it")),
    }
    for reason, found in reasons.items():
        assert found.rows == ()
        assert found.reason.startswith(reason)
        assert (found.headline.verdict, found.headline.ratio) == ("not compared", None)
        assert found.headline.reason == found.reason


def test_a_failing_or_shared_model_is_reported_not_raised():
    class Fails(nn.Conv2d):
        def forward(self, x):
            if self.weight.is_contiguous(memory_format=torch.channels_last):
                raise ValueError("not so")
            return super().forward(x)

    failed = timed(models(model=Fails(3, 4, 3)))
    assert failed.headline.verdict == "failed"
    said = speed_sentence(failed)
    assert "inference failed: forward of Fails: " in said
    assert "in forward: ValueError: not so" in said
    other = timed(models(unprepared=Fails(3, 4, 3).to(memory_format=torch.channels_last)))
    assert other.headline.verdict == "not compared"
    assert "ValueError: not so" in other.headline.reason
    model = net()
    shared = timed(models(unprepared=model, prepared=model))
    assert "are the same model" in shared.headline.reason


def test_an_internal_error_is_raised_but_out_of_memory_is_reported(monkeypatch):
    monkeypatch.setattr(levels, "compare", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        timed()
    monkeypatch.setattr(levels, "compare", lambda *_, **__: torch.empty(1 << 60))
    assert timed().headline.reason.startswith("out of memory: ")


@pytest.mark.parametrize("seconds", [1e-4, 0.01, 0.1, 0.3, 0.5, 0.8, 1.5, 2.9, 30.0])
@pytest.mark.parametrize("slowdown", [0.1, 1.0, 3.0])
def test_a_short_bench_ends_in_time_or_is_refused(monkeypatch, seconds, slowdown):
    monkeypatch.undo()
    clock = Clock()
    variants = {"a": clock.takes(seconds), "b": clock.takes(seconds * slowdown)}
    how = {"budget": levels.BUDGET["short"], "longest": levels.LONGEST, "precision": None}
    try:
        found = compare(variants, torch.ones(1), _clock=clock, **how)
    except RefusedError as error:
        assert "and 3 rounds do not fit into 120 s; give more" in str(error)
        assert re.search(r"calls take about .* s \(a\) and .* s \(b\)", str(error))
        assert seconds > 1
    else:
        assert found.repeats >= 3
        assert clock.now < (4 if seconds < 0.05 else 121)
        if seconds < 1:
            assert (
                found.row("b").verdict
                == {0.1: "faster", 1.0: "no difference", 3.0: "slower"}[slowdown]
            )


def test_a_soft_budget_allows_three_calls_and_a_round():
    clock = Clock()
    found = compare({"a": clock.takes(30.0)}, torch.ones(1), budget=1.0, _clock=clock)
    assert found.repeats == 1


def simulated(monkeypatch, clock, **seconds):
    """Time variants that take so many seconds on this clock in place of models."""
    monkeypatch.setattr(levels, "compare", lambda *_, **more: compare(
        {name: clock.takes(each) for name, each in seconds.items()}, torch.ones(1), _clock=clock,
        **{key: more[key] for key in ("budget", "longest", "precision")},
    ))  # fmt: skip


def test_a_short_bench_stops_when_its_verdict_is_clear(monkeypatch):
    monkeypatch.undo()
    clock = Clock()
    simulated(monkeypatch, clock, unprepared=0.02, prepared=0.01)
    found = timed()
    assert (found.repeats, found.headline.verdict) == (16, "faster")
    assert clock.now < 3


def test_a_short_bench_stops_when_its_verdict_cannot_become_clear(monkeypatch):
    monkeypatch.undo()
    clock = Clock()
    by_turns = itertools.cycle([0.05, 0.07]).__next__
    simulated(monkeypatch, clock, unprepared=0.06, prepared=by_turns)
    assert (timed().headline.verdict, clock.now) == ("unclear", pytest.approx(1.8, rel=0.02))
    clock.now = 0.0
    assert timed(level="full").headline.verdict == "unclear"
    assert clock.now > 59  # a precision was asked for


@pytest.mark.parametrize(
    ("seconds", "most"), [(0.3, 12), (0.62, 22), (0.93, 33), (1.1, 40), (3.0, 110)]
)
def test_slow_calls_are_timed_until_a_verdict(monkeypatch, seconds, most):
    monkeypatch.undo()
    clock = Clock()
    simulated(monkeypatch, clock, unprepared=seconds, prepared=0.7 * seconds)
    assert timed().headline.verdict == "faster"
    assert clock.now < most
    reason = timed(seconds=0.9).headline.reason
    assert reason.endswith("do not fit into 1 s; raise bench.seconds")


def test_progress_names_the_case_and_the_time_left():
    told = []
    timed(tell=told.append)
    assert told[:2] == ["timing: warming up unprepared", "timing: warming up prepared"]
    assert re.fullmatch(r"timing: \d+ rounds?, at most \d+ s left", told[-1])


def test_a_stage_updates_its_text_only_on_a_terminal(monkeypatch, capsys):
    with stage("timing") as tell:
        tell("one round")
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    with stage("timing") as tell:
        tell("one round")
        time.sleep(0.2)  # the spinner turns 12 times a second
    assert "one round" in capsys.readouterr().err


def references(monkeypatch, verify, bench):
    """The models that the stages of a run would compare with: none, a model, or the reason why not."""
    seen = []

    def look(self, work):
        seen.append(work.reference)
        return {}

    levels = {
        name: STAGES[name](level=level) for name, level in (("verify", verify), ("bench", bench))
    }
    for name in levels:
        monkeypatch.setattr(STAGES[name], "run", look)
    given = replace(settings(**levels), steps={"conv2d_memory_format": {}})
    monkeypatch.setattr(build_model, "instantiated", lambda _: net())
    run_stages.run_stages(given, folder=Path(), progress=lambda _: nullcontext(), show=lambda _: None)  # fmt: skip
    return seen


def test_a_stage_says_how_long_it_may_take(monkeypatch):
    def look(_, work):
        with work.progress("looking"):
            return {}

    said = []
    for name in ("verify", "bench"):
        monkeypatch.setattr(STAGES[name], "run", look)
    levels = {name: STAGES[name](level="short") for name in ("verify", "bench")}
    given = replace(settings(**levels), steps={"conv2d_memory_format": {}})
    monkeypatch.setattr(build_model, "instantiated", lambda _: net())
    run_stages.run_stages(given, folder=Path(), progress=lambda what: said.append(what) or nullcontext(), show=lambda _: None)  # fmt: skip
    limits = [re.search(r"; up to (\d+) s$", text)[1] for text in said if "looking" in text]
    assert (limits[0], len(limits)) == ("30", 2)


def test_the_time_of_a_verification_grows_with_the_step(monkeypatch):
    monkeypatch.undo()

    def longest(name, step, **options):
        work = SimpleNamespace(reference=net(), step_seconds=lambda: step)
        return STAGES[name](**options).longest(work)

    assert [longest("verify", step, level="short") for step in (1.0, 3.0, 100.0)] == [30, 60, 300]
    assert longest("verify", 100.0, level="short", seconds=7) == 7
    assert longest("verify", 1.0, level="none") == 0
    assert [longest("bench", step, level="short") for step in (0.1, 1.0, 3.0)] == [3, 15, 45]
    assert longest("bench", 1.0, level="full") == 60


def test_one_copy_serves_the_verification_and_the_bench(monkeypatch):
    copied = []
    monkeypatch.setattr(
        run_stages, "copy_or_build", lambda model, build: copied.append(model) or build()
    )
    for verify, bench in itertools.product(("none", "short", "full"), repeat=2):
        copied.clear()
        first, second = references(monkeypatch, verify, bench)
        wanted = {verify, bench} != {"none"}
        assert first is second
        assert (len(copied), first is not None) == (wanted, wanted), (verify, bench)


@pytest.mark.parametrize("name", ["verify", "bench"])
def test_a_stage_of_level_none_leaves_no_record(name):
    given = work(net(), reference=net(), example=example())
    assert STAGES[name](level="none").run(given) == {}


def test_a_large_model_is_copied_only_at_level_full(monkeypatch):
    monkeypatch.setattr(build_model, "LARGEST", 100)
    for verify, bench in (("short", "none"), ("none", "short"), ("short", "short")):
        found, _ = references(monkeypatch, verify, bench)
        assert found.startswith(
            "the model holds 560 bytes, too much to copy it by default; verify=full or"
        )
        timing = timed(models(unprepared=found))
        assert timing.headline.reason == found
    for verify, bench in (("full", "short"), ("none", "full"), ("short", "full")):
        assert isinstance(references(monkeypatch, verify, bench)[0], nn.Module)


@pytest.mark.parametrize("word", ["bench=short", "bench=full", "bench=none", "task=plan"])
def test_the_key_bench_sets_the_level(tmp_path, monkeypatch, capsys, word):
    timed = word in ("bench=short", "bench=full")
    code, out, folder = ran(tmp_path, monkeypatch, capsys, word)
    assert code == 0, out
    assert (folder / "bench.json").exists() == timed
    assert timed == ("faster    not measured" not in out and "faster    " in out)
    sections = {section.get("id") for section in Reader(made.page_of(folder)).all("section")}
    assert ("bench" in sections) == timed
    if timed:
        found = Comparison.load(folder / "bench.json")
        assert speed_sentence(found).removeprefix("inference ") in " ".join(out.split())
        assert found.rows


def test_the_default_level_is_short():
    assert settings().stages["bench"].level == "short"


def test_a_failed_verification_is_shown_beside_the_time(tmp_path, monkeypatch, capsys):
    wrong = replace(unknown("off", mode="eval"), status="fail")
    monkeypatch.setattr(STAGES["verify"], "run", lambda *_: {"verify": wrong})
    code, out, folder = ran(tmp_path, monkeypatch, capsys)
    assert code == 3
    assert "; but its outputs are wrong" in " ".join(out.split())
    text = made.page_of(folder)
    assert "The outputs of the prepared model are wrong" in text
    assert '<p class="bar wrong"' in text
