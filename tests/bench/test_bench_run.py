"""The key `bench`: its levels and limits, its file, the page with its charts, and their files."""

import copy
import itertools
import json
import re
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from clocks import Clock
from page_reader import HOSTILE, TEMPLATES, Reader, contrast
from prepare.bench import compare, looks
from prepare.bench.records import Bench, Case, Comparison, Control, VariantResult
from prepare.bench.samples import SampleSet
from prepare.cli import main as cli
from prepare.core.forward.example_input import Example
from prepare.errors import BenchError, RefusedError
from prepare.job import analyses
from prepare.job import time_prepared as levels
from prepare.job.settings import Settings
from prepare.job.time_prepared import INFERENCE, ONE_SAMPLE, TRAINING, Models, time_models
from prepare.pipeline import Pipeline
from prepare.report.charts.chart import (
    MARKS,
    WIDTH,
    Axis,
    Bar,
    Bars,
    Plane,
    Point,
    figure,
    laid_out,
    write_charts,
)
from prepare.report.charts.scale import number, scale_over
from prepare.report.pages.bench_section import bench_charts
from prepare.report.pages.page import run_page
from prepare.report.sentences import busy_sentence, case_sentence
from prepare.report.terminal.console import stage
from prepare.step import ModelStep
from prepare.verify.records import Check, unknown
from small_nets import bits

NET = ("model._target_=sample_nets.Net", "input.shape=[2,3,16,16]", "memfmt=channels_last", "device=cpu", "verify=none")  # fmt: skip
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """No more rounds than it takes, where a test says nothing else."""
    monkeypatch.setattr(levels, "PRECISION", {"short": 0.99, "full": 0.99})
    monkeypatch.setattr(looks, "_MIN_SECONDS", 0.0)
    monkeypatch.setattr(looks, "ROUNDS", (8,))
    monkeypatch.setattr(SampleSet, "is_settled", lambda _: True)


def net():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1)).eval()


def models(steps=None, model=None, **options):
    unprepared = model or net()
    pipeline = Pipeline.from_config(steps or {"conv2d_memory_format": {}})
    prepared = pipeline.apply(copy.deepcopy(unprepared), known_issues="ignore")
    return replace(Models(unprepared=unprepared, prepared=prepared, pipeline=pipeline), **options)


def values_of(model):
    return {name: bits(tensor) for name, tensor in model.state_dict().items()}


def example(batch=2):
    return Example((torch.randn(batch, 3, 8, 8),))


def timed(found=None, given=None, *, level="short", mode="eval", **more):
    return time_models(found or models(), given or example(), level=level, mode=mode, **more)


# ------------------------------------------------------------------------------ what is timed


@pytest.mark.parametrize(("mode", "what"), [("eval", INFERENCE), ("train", TRAINING)])
def test_short_times_the_step_of_the_mode(mode, what):
    found = timed(mode=mode)
    (case,) = found.cases
    assert (found.level, found.mode, case.what) == ("short", mode, what)
    assert case.comparison.settings["train"] is (mode == "train")
    assert [row.name for row in case.comparison.rows] == ["unprepared", "prepared"]
    assert case.comparison.baseline == "unprepared"
    assert found.headline == case.comparison.row("prepared")


def test_full_times_inference_one_sample_and_a_training_step():
    assert [case.what for case in timed(level="full").cases] == [INFERENCE, ONE_SAMPLE, TRAINING]
    trained = timed(level="full", mode="train")
    assert [case.what for case in trained.cases] == [TRAINING, INFERENCE, ONE_SAMPLE]
    sizes = [case.comparison.settings["batch_size"] for case in trained.cases]
    assert sizes == [2, 2, 1]
    one = timed(given=example(1), level="full")
    assert [case.what for case in one.cases] == [INFERENCE, TRAINING]


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


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_timing_restores_both_models(mode):
    found = models()
    found.prepared.register_forward_hook(lambda *_: None)
    kept = [
        (model, values_of(model), [m.training for m in model.modules()], list(model._forward_hooks))
        for model in (found.unprepared, found.prepared)
    ]
    given, state = example(), torch.get_rng_state()
    timed(found, given, mode=mode, level="full")
    for model, values, modes, hooks in kept:
        assert values_of(model) == values
        assert [module.training for module in model.modules()] == modes
        assert list(model._forward_hooks) == hooks
        assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)
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
    assert applied == [({"device": {"device": "cpu"}}, found.unprepared)]
    assert values_of(found.unprepared) == before


# ------------------------------------------------------------------------------ what is not compared


class Runtime(ModelStep):
    """As one that compiles, so that a first forward tells nothing of the next."""

    name = "runtime"
    phase = "runtime"

    def targets(self, model):
        return ()

    def act(self, model):
        return None


def test_a_case_without_comparison_has_a_reason():
    reasons = {
        "there is no example input": time_models(models(), None, level="short", mode="eval"),
        "no copy of it": timed(models(unprepared="no copy of it")),
        "inference takes about 7 s, too long for": timed(took=7.0),
        "training step takes about 9 s, too long for": timed(took=3.0, mode="train"),
    }
    for reason, found in reasons.items():
        (case,) = found.cases
        assert case.comparison is None
        assert case.reason.startswith(reason)
        assert (found.headline.verdict, found.headline.ratio) == ("not compared", None)
        assert found.headline.reason == case.reason
    assert timed(took=1e-6).cases[0].comparison
    assert timed(took=4.0).cases[0].comparison
    compiling = Pipeline([Runtime()])
    assert timed(models(pipeline=compiling), took=1e6).cases[0].comparison
    assert timed(took=1e6, level="full").cases[0].comparison


def test_a_failing_or_shared_model_is_reported_not_raised():
    class Fails(nn.Conv2d):
        def forward(self, x):
            if self.weight.is_contiguous(memory_format=torch.channels_last):
                raise ValueError("not so")
            return super().forward(x)

    failed = timed(models(model=Fails(3, 4, 3)))
    assert failed.headline.verdict == "failed"
    said = case_sentence(failed.cases[0])
    assert "inference: prepared failed: forward of Fails: " in said
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


# ------------------------------------------------------------------------------ its limits


@pytest.mark.parametrize("seconds", [1e-4, 0.01, 0.1, 0.3, 0.5, 0.8, 1.5, 2.9])
@pytest.mark.parametrize("slowdown", [0.1, 1.0, 3.0])
def test_a_short_bench_ends_within_10_seconds_or_is_refused(monkeypatch, seconds, slowdown):
    monkeypatch.undo()
    clock = Clock()
    variants = {"a": clock.takes(seconds), "b": clock.takes(min(seconds * slowdown, 2.9))}
    try:
        found = compare(
            variants,
            torch.ones(1),
            budget=levels.BUDGET["short"],
            within_budget=True,
            settle=True,
            _clock=clock,
        )
    except RefusedError as error:
        assert "rounds do not fit into 9 s; give more time" in str(error)
        assert re.search(r"(first calls took|calls take) about .* s \(a\)", str(error))
        assert max(seconds, seconds * slowdown) > 0.4
    else:
        assert found.repeats >= 3
    assert clock.now < 10


def test_a_soft_budget_allows_three_calls_and_a_round():
    clock = Clock()
    found = compare({"a": clock.takes(3.0)}, torch.ones(1), budget=1.0, _clock=clock)
    assert found.repeats == 1


def test_a_short_bench_stops_when_its_verdict_is_settled(monkeypatch):
    monkeypatch.undo()
    clock = Clock()
    monkeypatch.setattr(levels, "compare", lambda *_, **more: compare(
        {"unprepared": clock.takes(0.02), "prepared": clock.takes(0.01)}, torch.ones(1), _clock=clock,
        **{key: more[key] for key in ("budget", "within_budget", "settle", "precision")},
    ))  # fmt: skip
    found = timed()
    assert found.cases[0].comparison.repeats == 16
    assert clock.now < 3


def test_progress_names_the_case_and_the_time_left():
    told = []
    timed(tell=told.append)
    assert told[:2] == [
        "timing inference: warming up unprepared",
        "timing inference: warming up prepared",
    ]
    assert re.fullmatch(r"timing inference: \d+ rounds?(, known to ±[\d.]+%)?, at most \d+ s left", told[-1])  # fmt: skip


def test_a_stage_updates_its_text_only_on_a_terminal(monkeypatch, capsys):
    with stage("timing", after=60) as tell:
        tell("one round")
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    with stage("timing") as tell:
        tell("one round")
        time.sleep(0.2)  # the spinner turns 12 times a second
    assert "one round" in capsys.readouterr().err


# ------------------------------------------------------------------------------ the copy


def settings(verify, bench):
    return Settings(model={}, steps={}, input={}, verify=verify, bench=bench, choices={})


def test_one_copy_serves_the_verification_and_the_bench(monkeypatch):
    copied = []
    monkeypatch.setattr(
        analyses, "copy_or_build", lambda model, build: copied.append(model) or build()
    )
    model = net()
    for verify, bench in itertools.product(("none", "short", "full"), repeat=2):
        copied.clear()
        found = analyses.reference_of(settings(verify, bench), model, net)
        wanted = {verify, bench} != {"none"}
        assert (len(copied), found is not None) == (wanted, wanted), (verify, bench)
    checked = analyses.verification_of(settings("none", "short"), Pipeline([]), net(), model, example())  # fmt: skip
    assert checked is None
    assert analyses.bench_of(settings("short", "none"), Pipeline([]), net(), model, example(), took=0, tell=None) is None  # fmt: skip


def test_a_large_model_is_copied_only_at_level_full(monkeypatch):
    monkeypatch.setattr(analyses, "LARGEST", 100)
    for verify, bench in (("short", "none"), ("none", "short"), ("short", "short")):
        found = analyses.reference_of(settings(verify, bench), net(), net)
        assert found.startswith(
            "the model holds 560 bytes, too much to copy it by default; verify=full or"
        )
        timing = timed(models(unprepared=found))
        assert timing.headline.reason == found
    for verify, bench in (("full", "short"), ("none", "full"), ("short", "full")):
        assert isinstance(analyses.reference_of(settings(verify, bench), net(), net), nn.Module)


# ------------------------------------------------------------------------------ the command line


def ran(tmp_path, monkeypatch, capsys, *words):
    monkeypatch.chdir(tmp_path)
    code = cli.run([*NET, *words, "hydra.run.dir=run"])
    return code, capsys.readouterr().out, tmp_path / "run"


@pytest.mark.parametrize("level", ["short", "full", "none"])
def test_the_key_bench_sets_the_level(tmp_path, monkeypatch, capsys, level):
    code, out, folder = ran(tmp_path, monkeypatch, capsys, f"bench={level}")
    assert code == 0, out
    assert (folder / "bench.json").exists() is (level != "none")
    assert ("timed  " in out) is (level != "none")
    sections = {section.get("id") for section in Reader(run_page(folder)).all("section")}
    assert ("bench" in sections) is (level != "none")
    if level != "none":
        found = Bench.load(folder / "bench.json")
        assert len(found.cases) == {"short": 1, "full": 3}[level]
        assert case_sentence(found.cases[0]) in " ".join(out.split())
        assert all(case.comparison is not None for case in found.cases)


def test_the_default_level_is_short():
    assert Settings(model={}, steps={}, input={}, choices={}).bench == "short"


def test_a_failed_verification_is_shown_beside_the_time(tmp_path, monkeypatch, capsys):
    wrong = replace(unknown("off", level="short", mode="eval"), status="fail")
    monkeypatch.setattr(analyses, "verification_of", lambda *_: wrong)
    code, out, folder = ran(tmp_path, monkeypatch, capsys)
    assert code == 3
    assert "; but its outputs are wrong, see verified" in " ".join(out.split())
    text = run_page(folder)
    assert "The outputs of the prepared model are wrong" in text
    assert 'class="ch-wrong"' in text


def test_a_plan_times_nothing(tmp_path, monkeypatch, capsys):
    code, out, folder = ran(tmp_path, monkeypatch, capsys, "task=plan")
    assert code == 0
    assert "timed" not in out
    assert not (folder / "bench.json").exists()


# ------------------------------------------------------------------------------ records


def comparison(ratio=0.73, *, verdict="faster", interval=(0.70, 0.76), repeats=20, **more):
    rows = (
        VariantResult(name="unprepared", verdict="baseline", seconds=0.04, seconds_interval=(0.038, 0.045),
            ratio=1.0, throughput=50.0, peak_bytes=1 << 26, device="cpu", calls=1, samples=(0.04,)),
        VariantResult(name="prepared", verdict=verdict, seconds=0.04 * ratio, seconds_interval=(0.03 * ratio, 0.05 * ratio),
            ratio=ratio, ratio_interval=interval, throughput=50 / ratio, peak_bytes=1 << 25, device="cpu", calls=1),
    )  # fmt: skip
    settings = {"train": False, "confidence": 0.95, "threads": 2, "batch_size": 2}
    found = Comparison(rows=rows, baseline="unprepared", aa=Control(ratio=1.0, interval=(0.99, 1.01), noise=1.01),
                       repeats=repeats, seconds=3.2, settings=settings, environment={}, notes=("a note",))  # fmt: skip
    return replace(found, **more)


def bench(*found, **more):
    cases = [Case(what=INFERENCE, comparison=one) for one in found or (comparison(),)]
    return Bench(level="short", mode="eval", seconds=3.5, cases=tuple(cases), **more)


def verified(error=2e-6, allowed=1e-4, status="pass"):
    check = Check(what="outputs", status=status, error=error, allowed=allowed)
    other = Check(what="input gradients", status=status, error=0.5, allowed=1e-4)
    return replace(unknown("", level="short", mode="eval"), status=status, checks=(check, other))


def test_a_bench_survives_saving_and_loading(tmp_path):
    found = bench(comparison(), comparison(1.2, verdict="slower"))
    found = replace(found, cases=(*found.cases, Case(what=TRAINING, reason="too long")))
    found.save(tmp_path / "bench.json")
    assert Bench.load(tmp_path / "bench.json") == found
    assert Comparison.load(tmp_path / "bench.json") == found.cases[0].comparison
    replace(found, cases=found.cases[2:]).save(tmp_path / "none.json")
    with pytest.raises(BenchError, match="nothing was compared: too long"):
        Comparison.load(tmp_path / "none.json")


def test_the_headline_is_read_without_torch(tmp_path):
    bench().save(tmp_path / "bench.json")
    code = (
        "import sys; from prepare.bench.records import Bench; "
        f"row = Bench.load({str(tmp_path / 'bench.json')!r}).headline; "
        "print(row.ratio, row.ratio_interval, row.verdict, 'torch' in sys.modules)"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root)
    assert (done.stdout, done.stderr) == ("0.73 (0.7, 0.76) faster False\n", "")


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (comparison(), "inference: 1.4x faster (27 % less time, 95 % interval: 24 to 30 %): 29.2 ms instead of 40.0 ms"),
        (comparison(1.0, verdict="no difference", interval=(0.98, 1.02)),
         "inference: no difference (95 % interval: -2.0 to +2.0 % time): 40.0 ms"),
        (comparison(verdict="unclear"), "inference: unclear (95 % interval: -30 to -24 % time): the interval is too wide"),
        (comparison(verdict="unclear", interval=(0.002, 2620.0)), "inference: unclear: the interval is too wide"),
        (comparison(verdict="unclear", interval=None), "inference: unclear: the interval is too wide"),
        (comparison(1.2, verdict="slower", interval=(1.1, 1.3)), "inference: 1.2x slower (20 % more time, 95 % interval: 10 to 30 %): 48.0 ms instead of 40.0 ms"),
        (comparison(45.0, verdict="slower", interval=(44, 46)), "inference: 45x slower (95 % interval: 44x to 46x): 1.80 s instead of 40.0 ms"),
    ],
)  # fmt: skip
def test_a_case_is_described_in_one_sentence(found, said):
    assert case_sentence(Case(what=INFERENCE, comparison=found)) == said


def test_an_old_verdict_is_read_as_one_of_today(tmp_path):
    old = "no significant difference"
    wide, narrow = (0.7, 1.3), (0.98, 1.02)
    bench(comparison(1.0, verdict=old, interval=wide), comparison(1.0, verdict=old, interval=narrow)).save(tmp_path / "bench.json")  # fmt: skip
    found = Bench.load(tmp_path / "bench.json")
    assert [case.row.verdict for case in found.cases] == ["unclear", "no difference"]


def test_a_busy_machine_is_a_reason_and_a_line():
    busy = {"cores_available": 2, "others": 1.6, "threads": 2}
    found = comparison(settings=comparison().settings | busy)
    assert busy_sentence(bench(found)) == (
        "this machine is busy (other programs use 1.6 of 2 cores): times mean little; try again later"
    )
    assert busy_sentence(bench()) == busy_sentence(None) == ""


# ------------------------------------------------------------------------------ the page


def page_of(folder, found, checked=None):
    folder.mkdir(exist_ok=True)
    found.save(folder / "bench.json")
    if checked:
        checked.save(folder / "verify.json")
    return run_page(folder)


def test_the_page_shows_the_figures_the_charts_and_the_notes(tmp_path):
    text = page_of(tmp_path, bench(), verified())
    read = Reader(text)
    for said in (
        "Inference: 1.4x faster (27 % less time, 95 % interval: 24 to 30 %)",
        "inference prepared 29.2 ms 21.9 ms to 36.5 ms -27 % -30 to -24 % 68.5 32.0 MiB 1.4x faster",
        "20 rounds in 3.20 s, 2 samples a call, 2 threads; the baseline against itself: differences below 1.0 % are noise",
        "inference: a note",
        "with 95% confidence",
        "Peak memory beyond the model",
        "Faster? 1.4x faster (27 % less time)",
    ):
        assert said in read.text, said
    assert len(read.all("svg")) == 3
    assert "script" not in read.tags


def test_the_page_shows_why_a_case_was_not_compared(tmp_path):
    found = replace(bench(), cases=(Case(what=INFERENCE, reason="too long for it"),))
    read = Reader(page_of(tmp_path, found))
    assert "Inference: not compared: too long for it" in read.text
    assert not read.all("svg")


def test_names_in_a_bench_are_escaped_on_the_page(tmp_path):
    hostile = [
        replace(row, name=HOSTILE[at], reason="\n".join(HOSTILE), verdict=row.verdict)
        for at, row in enumerate(comparison().rows)
    ]
    found = comparison(rows=tuple(hostile), baseline=HOSTILE[0], notes=tuple(HOSTILE))
    found = replace(bench(found), cases=(Case(what=HOSTILE[1], comparison=found),))
    safe = Reader(page_of(tmp_path / "safe", bench(), verified()))
    read = Reader(page_of(tmp_path / "odd", found, verified()))
    assert read.tags <= safe.tags
    assert "alert(1)" in read.text


# ------------------------------------------------------------------------------ charts


def bars(*values, **more):
    return Bars(title="Time", rows=tuple(Bar(label=f"bar {v}", value=v, text=f"{v} ms", **more) for v in values))  # fmt: skip


def plane(*points, x=None, y=None):
    found = tuple(Point(label=f"p{at}", x=a, y=b, text="there") for at, (a, b) in enumerate(points))
    return Plane(title="Speed", points=found, x=x or Axis(label="time"), y=y or Axis(label="error", log=True))  # fmt: skip


def parsed(chart):
    return ET.fromstring(str(figure(chart, name="x")).replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg"', 1))  # fmt: skip


def test_bars_are_proportional_to_their_values():
    chart = bars(10.0, 5.0, 0.0)
    wide = [row["wide"] for row in laid_out(chart)["rows"]]
    assert wide[0] == pytest.approx(WIDTH, abs=1)
    assert wide[1] == pytest.approx(WIDTH / 2, abs=1)
    assert wide[2] == pytest.approx(0, abs=1)
    assert laid_out(bars(None, 1.0))["rows"][0]["wide"] is None
    widest = replace(chart.rows[0], interval=(8.0, 12.5))
    drawn = laid_out(replace(chart, rows=(widest, *chart.rows[1:])))
    assert drawn["rows"][0]["interval"][1] == pytest.approx(WIDTH, abs=1)
    assert drawn["rows"][0]["wide"] == pytest.approx(WIDTH * 0.8, abs=1)


def test_a_chart_describes_itself_to_screen_readers():
    root = parsed(bars(1.0, 2.0))
    title, desc = (root.find(f"{{http://www.w3.org/2000/svg}}{tag}") for tag in ("title", "desc"))
    assert (title.text, desc.text) == ("Time", "bar 1.0: 1.0 ms; bar 2.0: 2.0 ms")
    assert root.get("role") == "img"
    assert root.get("aria-labelledby").split() == [title.get("id"), desc.get("id")]


@pytest.mark.parametrize(
    "chart",
    [
        Bars(title="none", rows=()),
        bars(None),
        bars(0.0),
        bars(1e-12, 1e12, interval=(0.0, 1e12)),
        bars(*range(100), mark="no such mark"),
        plane(),
        plane((1, 0)),
        plane((0, 0), (0, 0)),
        plane((1, 1e-300), (2, 1e300)),
        plane(*((1 + at / 1e6, 1e-3) for at in range(60))),
        plane((1, 1), x=Axis(label="x", log=True, lines=((1.0, "as fast"),)), y=Axis(label="y", lines=((0.5, "allowed"),))),
        replace(bars(1.0), rows=tuple(Bar(label=name, value=1.0, text=name, mark=name) for name in HOSTILE)),
        replace(plane(), points=tuple(Point(label=name, x=1.0, y=1.0, text=name, mark=name) for name in HOSTILE)),
    ],
)  # fmt: skip
def test_any_chart_can_be_drawn_within_its_frame(chart):
    parsed(chart)
    drawn = laid_out(chart)
    for row in drawn.get("rows", ()):
        assert 0 <= (row["wide"] or 0) <= WIDTH
    for point in drawn.get("points", ()):
        assert drawn["box"]["left"] <= point["x"] <= drawn["box"]["right"]
        assert drawn["box"]["top"] <= point["y"] <= drawn["box"]["bottom"]


def test_zero_is_drawn_below_a_logarithmic_scale():
    drawn = laid_out(plane((1.0, 0.0), (0.5, 1e-6), (0.7, 1e-3)))
    zero, small, large = (point["y"] for point in drawn["points"])
    assert drawn["box"]["bottom"] > zero > small > large
    assert drawn["y"]["ticks"][0] == (zero, "0")
    assert "0" not in [word for _, word in laid_out(plane((1.0, 1e-3)))["y"]["ticks"]]


def test_labels_that_would_overlap_are_left_out():
    drawn = laid_out(plane(*((1.0, 10.0**-at) for at in (*[3] * 60, 4, 5))))
    labels = drawn["labels"]
    assert 2 <= len(labels) < 60
    boxes = []
    for x, y, anchor, text in labels:
        long = 6.7 * len(text)
        left = x - {"start": 0, "middle": long / 2, "end": long}[anchor]
        boxes.append((left, y - 11, left + long, y + 3))
    for one, other in itertools.combinations(boxes, 2):
        apart = one[2] <= other[0] or other[2] <= one[0] or one[3] <= other[1] or other[3] <= one[1]
        assert apart


@pytest.mark.parametrize("values", [[0.73, 1.0], [1e-7, 1e-3], [3.0, 4.0], [1e6], [], [0.0], [5e-9, 2.0]])  # fmt: skip
@pytest.mark.parametrize("log", [False, True])
def test_a_scale_has_a_few_round_ticks_in_order(values, log):
    scale = scale_over(values, 0, 100, log=log, room_for_zero=10)
    ticks = scale.ticks()
    assert 2 <= len(ticks) <= 8
    assert [scale(tick) for tick in ticks] == sorted(scale(tick) for tick in ticks)
    assert len({number(tick) for tick in ticks}) == len(ticks)
    assert all(float(number(tick)) == pytest.approx(tick) for tick in ticks)


@pytest.mark.parametrize("dark", [False, True])
def test_chart_colours_have_enough_contrast_in_light_and_dark(dark):
    light, _, rest = (TEMPLATES / "charts.css").read_text().partition("@media (prefers-color-scheme: dark)")  # fmt: skip
    colours = dict(re.findall(r"--([\w-]+): (#\w{6})", light))
    if dark:
        colours |= dict(re.findall(r"--([\w-]+): (#\w{6})", rest))
    for text in ("ink", "soft"):
        assert contrast(colours[text], colours["paper"]) >= 4.5
    for mark in MARKS:
        assert contrast(colours[mark], colours["paper"]) >= 3


def test_the_plane_shows_speed_against_the_largest_output_error():
    chart = bench_charts(bench(), verified())[-1]
    unprepared, prepared = chart.points
    assert (unprepared.x, unprepared.y, unprepared.mark) == (1.0, 0.0, "baseline")
    assert (prepared.x, prepared.y, prepared.mark) == (0.73, 2e-6, "better")
    assert prepared.x_interval == (0.70, 0.76)
    assert chart.y.lines == ((1e-4, "allowed"),)
    assert not any(isinstance(chart, Plane) for chart in bench_charts(bench(), None))
    wrong = bench_charts(bench(), verified(status="fail"))[-1]
    assert wrong.points[1].mark == "wrong"


def test_each_case_has_a_chart_of_times_and_all_share_memory():
    charts = bench_charts(bench(comparison(), comparison(1.2, verdict="slower")), None)
    assert [chart.title for chart in charts] == [
        *["Time of one inference"] * 2,
        "Peak memory beyond the model",
    ]
    assert [bar.mark for chart in charts[:2] for bar in chart.rows] == [
        "baseline",
        "better",
        "baseline",
        "worse",
    ]
    assert [bar.label for bar in charts[2].rows] == [f"{name}, inference" for name in ("unprepared", "prepared")] * 2  # fmt: skip
    bare = [replace(row, peak_bytes=None) for row in comparison().rows]
    assert len(bench_charts(bench(comparison(rows=tuple(bare))), None)) == 1


# ------------------------------------------------------------------------------ the file of charts


def test_a_chart_file_is_valid_and_the_same_each_time(tmp_path):
    charts = bench_charts(bench(), verified())
    for name in ("a.svg", "b.svg"):
        write_charts(charts, tmp_path / name)
    root = ET.parse(tmp_path / "a.svg").getroot()
    texts = {element.text for element in root.iter(f"{SVG}text")}
    assert {chart.title for chart in charts} <= texts
    assert len(list(root.iter(f"{SVG}svg"))) == 1 + len(charts)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_the_charts_of_a_chart_file_do_not_overlap(tmp_path):
    write_charts([bars(1.0, 2.0), bars(3.0), plane((1, 0))], tmp_path / "a.svg")
    root = ET.parse(tmp_path / "a.svg").getroot()
    boxes = []
    for group in root.findall(f"{SVG}g[@transform]"):
        left, top = map(int, re.findall(r"\d+", group.get("transform")))
        chart = group.find(f"{SVG}svg")
        boxes.append(
            (left, top - 30, left + int(chart.get("width")), top + int(chart.get("height")))
        )
    for one, other in itertools.combinations(boxes, 2):
        assert one[2] <= other[0] or other[2] <= one[0] or one[3] <= other[1] or other[3] <= one[1]
    assert max(box[2] for box in boxes) <= int(root.get("width"))
    assert max(box[3] for box in boxes) <= int(root.get("height"))


def test_any_name_can_stand_in_a_chart_file(tmp_path):
    write_charts([replace(bars(1.0), title=name) for name in HOSTILE], tmp_path / "a.svg")
    assert len(ET.parse(tmp_path / "a.svg").getroot().findall(f"{SVG}g[@transform]")) == len(
        HOSTILE
    )


def test_no_charts_give_no_file(tmp_path):
    write_charts([], tmp_path / "a.svg")
    assert list(tmp_path.iterdir()) == []


def test_a_run_writes_the_charts_of_its_timing(tmp_path, monkeypatch, capsys):
    _, _, folder = ran(tmp_path, monkeypatch, capsys)
    root = ET.parse(folder / "bench.svg").getroot()
    assert "Time of one inference" in {element.text for element in root.iter(f"{SVG}text")}


def test_a_page_with_a_bench_is_written_without_torch(tmp_path):
    bench().save(tmp_path / "bench.json")
    code = (
        "import sys; from prepare.report.pages.page import write_page; "
        f"write_page({str(tmp_path)!r}); print('torch' in sys.modules)"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root)
    assert (done.stdout, done.stderr) == ("False\n", "")
    assert json.loads((tmp_path / "bench.json").read_text())["format"] == "prepare.bench"
