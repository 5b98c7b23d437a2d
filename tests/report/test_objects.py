"""Records shown in Python: one line, the text of the terminal, a page's section, and all in a notebook."""

import copy
import os
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from made import bench_of, comparison, make, tuning
from paths import PYTHONPATH
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
    return {
        type(record).__name__: record for record in [*found, bench_of(), comparison(), tuning()]
    }


@pytest.fixture(scope="module")
def records():
    return make_records()


KINDS = {
    "Plan": ("2 of 4 tensors to change", "contiguous -> channels_last"),
    "Audit": ("4 tensors; convolutions: ", "2 converted"),
    "Flow": ("1 break, InstanceNorm2d", "lost in"),
    "Verification": ("pass: ", "verify (short)"),
    "Bench": ("inference 1.4x faster, ", "40.0 ms"),
    "Comparison": ("unprepared baseline, prepared faster; 20 rounds", "0.700 to 0.760"),
    "Tuning": ("half is ", "tune (inference)"),
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
    long = make(Comparison, rows=(VariantResult(name="x" * 500, verdict="baseline"),), aa=None)
    assert len(repr(long)) == 160
    assert repr(long).endswith("...)")


def test_without_the_extra_text_is_one_line_and_no_html(records, monkeypatch):
    for name in ("rich", "rich.table", "rich.console", "jinja2", "markupsafe"):
        monkeypatch.setitem(sys.modules, name, None)
    for name in [name for name in sys.modules if name.startswith("prepare.app.report")]:
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


@pytest.mark.slow
def test_every_record_is_shown_in_a_notebook():
    nbformat = pytest.importorskip("nbformat")
    client = pytest.importorskip("nbclient")
    notebook = nbformat.v4.new_notebook()
    code = NOTEBOOK.format(path=[str(Path(__file__).parent), *PYTHONPATH.split(os.pathsep)])
    notebook.cells = [nbformat.v4.new_code_cell(code)]
    client.NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    shown = [output.data for output in notebook.cells[0].outputs if "data" in output]
    assert len(shown) == len(KINDS)
    assert all("prepare-record" in data["text/html"] for data in shown)
    assert all(data["text/plain"].startswith(tuple(KINDS)) for data in shown)
