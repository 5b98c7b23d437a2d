"""The key bench: its levels and limits, and a run that times its model."""

import copy
import re
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import made
from clocks import Clock
from made import ran
from page_reader import Reader
from prepare.core.forward.example_input import Example
from prepare.errors import RefusedError
from prepare.pipeline import Pipeline
from prepare.stages.bench import compare
from prepare.stages.bench import time_prepared as levels
from prepare.stages.bench.document import speed_sentence
from prepare.stages.bench.records import INFERENCE, TRAINING, Comparison
from prepare.stages.bench.time_prepared import time_models

pytestmark = pytest.mark.usefixtures("quick")


def net():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1)).eval()


def models(steps=None, model=None, **options):
    unprepared = model or net()
    pipeline = Pipeline.from_config(steps or {"conv2d_memory_format": {}})
    prepared = pipeline.apply(copy.deepcopy(unprepared), known_issues="ignore")
    found = {"unprepared": unprepared, "prepared": prepared, "pipeline": pipeline} | options
    return SimpleNamespace(**found)


def example(batch=2):
    return Example((torch.randn(batch, 3, 8, 8),))


def timed(found=None, given=None, *, mode="eval", **more):
    them = vars(found or models()).values()
    return time_models(*them, given or example(), mode=mode, **more)


@pytest.mark.parametrize(("mode", "what"), [("eval", INFERENCE), ("train", TRAINING)])
def test_short_times_the_step_of_the_mode(mode, what):
    found = timed(mode=mode)
    assert found.what == what
    assert [row.name for row in found.rows] == ["unprepared", "prepared"]
    assert found.baseline == "unprepared"
    assert found.headline == found.row("prepared")


def test_what_is_not_compared_has_a_reason():
    no_example = time_models(*vars(models()).values(), None, mode="eval")
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
    how = {"budget": levels.BUDGET, "longest": levels.LONGEST, "precision": None}
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


@pytest.mark.parametrize("word", ["bench=short", "bench=none", "task=plan"])
def test_the_key_bench_sets_the_level(tmp_path, monkeypatch, capsys, word):
    timed = word == "bench=short"
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
