"""Records shown in Python: one line, the text of the terminal, a page's section, and all in a notebook."""

import copy
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from prepare.audit import audit
from prepare.bench.records import Bench, Case, Comparison, Control, VariantResult
from prepare.flow import observe
from prepare.pipeline import Pipeline
from prepare.tune.records import CandidateResult, Tuning
from prepare.verify import verify


def comparison():
    rows = (
        VariantResult(name="unprepared", verdict="baseline", seconds=0.2, ratio=1.0),
        VariantResult(
            name="prepared", verdict="faster", seconds=0.1, ratio=0.5, ratio_interval=(0.4, 0.6)
        ),
    )
    settings = {"train": False, "confidence": 0.95, "threads": 1, "batch_size": 2}
    return Comparison(
        rows=rows,
        baseline="unprepared",
        aa=Control(ratio=1.0, interval=(0.99, 1.01), noise=1.01),
        repeats=9,
        seconds=1.0,
        settings=settings,
        environment={},
    )


def tuning():
    row = CandidateResult(
        name="channels_last",
        steps={},
        status="winner",
        reason="faster",
        cost=1,
        ratio=0.5,
        rounds=9,
    )
    return Tuning(
        rows=(row,), winner="channels_last", mode="eval", allow=(), budget=1.0, seconds=1.0,
        rounds=9, noise=1.01, made="", from_cache=False, conditions={}, environment={},
    )  # fmt: skip


def make_records():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.InstanceNorm2d(8), nn.Conv2d(8, 4, 3)).eval()
    pipeline = Pipeline.from_config({"conv2d_memory_format": {}})
    plan, reference, batch = pipeline.plan(model), copy.deepcopy(model), torch.randn(2, 3, 16, 16)
    pipeline.apply(model, known_issues="ignore")
    bench = Bench(
        level="", mode="eval", seconds=1.0, cases=(Case(what="inference", comparison=comparison()),)
    )
    found = [plan, audit(model, plan=plan), observe(model, batch), verify(reference, model, batch)]
    return {type(record).__name__: record for record in [*found, bench, comparison(), tuning()]}


@pytest.fixture(scope="module")
def records():
    return make_records()


KINDS = {
    "Plan": ("2 of 4 tensors to change", "contiguous -> channels_last"),
    "Audit": ("4 tensors; convolutions: ", "2 converted"),
    "Flow": ("1 break, InstanceNorm2d", "lost in"),
    "Verification": ("pass: ", "verify (short)"),
    "Bench": ("inference: ", "100 ms"),
    "Comparison": ("unprepared baseline, prepared faster; 9 rounds", "0.400 to 0.600"),
    "Tuning": ("channels_last: ", "tune (inference)"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_record_shows_itself_in_three_forms(records, kind):
    record, (line, text) = records[kind], KINDS[kind]
    assert repr([record]).startswith(f"[{kind}({line}")
    assert "\n" not in repr(record)
    assert len(repr(record)) <= 160
    assert text in str(record)
    html = record._repr_html_()
    assert html.startswith('<div class="prepare-record">')
    assert "@scope (.prepare-record)" in html
    assert "<script" not in html
    assert "<table" in html or kind == "Plan"


def test_a_long_sentence_is_cut_in_the_one_line():
    row = VariantResult(name="x" * 500, verdict="baseline")
    long = Comparison(
        rows=(row,), baseline="x", aa=None, repeats=1, seconds=1, settings={}, environment={}
    )
    assert len(repr(long)) == 160
    assert repr(long).endswith("...)")


def test_without_the_extra_text_is_one_line_and_no_html(records, monkeypatch):
    for name in ("rich", "rich.table", "rich.console", "jinja2", "markupsafe"):
        monkeypatch.setitem(sys.modules, name, None)
    for name in [name for name in sys.modules if name.startswith("prepare.report")]:
        monkeypatch.delitem(sys.modules, name)
    flow = records["Flow"]
    assert str(flow).splitlines()[0] == repr(flow)
    assert "pip install 'torch-prepare[cli]'" in str(flow)
    assert flow._repr_html_() is None


NOTEBOOK = """
import sys
sys.path[:0] = {path!r}
import test_objects
for record in test_objects.make_records().values():
    display(record)
"""


def test_every_record_is_shown_in_a_notebook():
    nbformat = pytest.importorskip("nbformat")
    client = pytest.importorskip("nbclient")
    notebook = nbformat.v4.new_notebook()
    code = NOTEBOOK.format(path=[str(Path(__file__).parent)])
    notebook.cells = [nbformat.v4.new_code_cell(code)]
    client.NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    shown = [output.data for output in notebook.cells[0].outputs if "data" in output]
    assert len(shown) == len(KINDS)
    assert all("prepare-record" in data["text/html"] for data in shown)
    assert all(data["text/plain"].startswith(tuple(KINDS)) for data in shown)
