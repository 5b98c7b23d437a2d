"""Records shown in Python: one line, and the text of the terminal."""

import copy
import sys

import pytest
import torch
from torch import nn

from made import comparison, make, tuning
from prepare.audit import audit
from prepare.pipeline import Pipeline
from prepare.stages.bench.records import Comparison, VariantResult
from prepare.stages.flow import observe
from prepare.stages.verify import verify


def make_records():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.InstanceNorm2d(8), nn.Conv2d(8, 4, 3)).eval()
    pipeline = Pipeline.from_config({"conv2d_memory_format": {}})
    plan, reference, batch = pipeline.plan(model), copy.deepcopy(model), torch.randn(2, 3, 16, 16)
    pipeline.apply(model, known_issues="ignore")
    found = [plan, audit(model, plan=plan), observe(model, batch), verify(reference, model, batch)]
    return {type(record).__name__: record for record in [*found, comparison(), tuning()]}


@pytest.fixture(scope="module")
def records():
    return make_records()


KINDS = {
    "Plan": ("2 of 4 tensors to change", "contiguous -> channels_last"),
    "Audit": ("4 tensors; convolutions: ", "2 converted"),
    "Flow": ("1 break, InstanceNorm2d", "lost in"),
    "Verification": ("pass: ", "verify"),
    "Comparison": ("inference 1.4x faster, ", "40.0 ms"),
    "Tuning": ("half is ", "tune (inference)"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_record_shows_itself_as_a_line_and_a_text(records, kind):
    record, (line, text) = records[kind], KINDS[kind]
    assert repr([record]).startswith(f"[{kind}({line}")
    assert "\n" not in repr(record)
    assert len(repr(record)) <= 160
    assert text in str(record)


def test_a_long_sentence_is_cut_in_the_one_line():
    long = make(
        Comparison, rows=(VariantResult(name="x" * 500, verdict="baseline"),), baseline="x" * 500
    )
    assert len(repr(long)) == 160
    assert repr(long).endswith("...)")


def test_without_the_extra_the_text_is_one_line(records, monkeypatch):
    for name in ("rich", "rich.table", "rich.console"):
        monkeypatch.setitem(sys.modules, name, None)
    for name in [name for name in sys.modules if name.startswith("prepare.app.report")]:
        monkeypatch.delitem(sys.modules, name)
    flow = records["Flow"]
    assert str(flow).splitlines()[0] == repr(flow)
    assert "pip install 'torch-prepare[cli]'" in str(flow)
