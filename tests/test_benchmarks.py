"""Tests of the benchmark scripts, and of the tables that the pages show."""

import importlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
SCRIPTS = sorted(path.stem for path in BENCHMARKS.glob("*.py"))


@pytest.fixture
def script(monkeypatch):
    """Return a function that imports a module of benchmarks/ as a script does."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(BENCHMARKS)):
            del sys.modules[name]


@pytest.fixture
def tables(script):
    return script("tables")


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_can_be_imported_and_says_what_it_is_for(script, name):
    assert script(name).__doc__


def test_the_tables_on_the_pages_match_the_raw_files(tables):
    pages = [page.read_text() for page in tables.PAGES]
    assert pages == list(map(tables.updated, pages)), "run python benchmarks/tables.py"
    named = re.findall(r"<!-- results: (.+) -->", "".join(pages))
    assert sorted(named) == sorted(tables.TABLES)


@pytest.mark.slow
def test_a_changed_figure_changes_the_page(tables, tmp_path, monkeypatch):
    results = tmp_path / "results"
    shutil.copytree(tables.RESULTS, results)
    monkeypatch.setattr(tables, "RESULTS", results)
    page = "".join(page.read_text() for page in tables.PAGES)
    for name in sorted({name.split()[0] for name in tables.TABLES}):
        path = results / f"{name}.json"
        text = path.read_text()
        path.write_text(_longer(text))
        assert tables.updated(page) != page, name
        path.write_text(text)
    assert tables.updated(page) == page


def _longer(text: str) -> str:
    """Return the file with each number replaced by its position in the file."""
    places = iter(range(1, 1 << 30))

    def changed(each):
        if isinstance(each, dict):
            return {key: changed(value) for key, value in each.items()}
        if isinstance(each, list):
            return [changed(value) for value in each]
        is_number = isinstance(each, int | float) and not isinstance(each, bool)
        return type(each)(next(places)) if is_number else each

    return json.dumps(changed(json.loads(text)))


def test_a_ratio_compares_times_of_the_same_round(tables):
    seconds = {variant: [1.0, 10.0, 1.0] for variant in tables.layout_repair.VARIANTS}
    seconds[tables.WITH] = [0.5, 5.0, 8.0]
    assert tables.layout_repair.ratio(seconds, tables.WITH) == 0.5
    assert tables.layout_repair.ratio(seconds, tables.AGAIN) == 1.0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_the_gpu_benchmark_needs_a_cuda_device():
    done = subprocess.run([sys.executable, BENCHMARKS / "gpu.py"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert "nothing was measured, and nothing is reported" in done.stderr


def test_a_dry_run_of_the_gpu_benchmark_runs_every_part(tmp_path, script, monkeypatch):
    gpu, file = script("gpu"), tmp_path / "gpu.json"
    monkeypatch.setattr(gpu.zoo, "measure", lambda network, case, **_: {**case, "rows": {}})
    layouts = {"ratios": {}, "dropped_rounds": 0}
    monkeypatch.setattr(gpu.gpu_layouts, "measure", lambda *_, **__: layouts)
    for name in ("line_of", "tables"):
        monkeypatch.setattr(gpu, name, lambda *_: "")
    words = ["gpu.py", "--dry-run", "--precision", "bfloat16", "--out", str(file)]
    monkeypatch.setattr(sys, "argv", words)
    gpu.main()
    found = json.loads(file.read_text())
    assert found["dry_run"]
    assert len(found["cases"]) == 4
    assert not found["left_out"]
    cases = found["layout_cases"].keys() | found["layouts_left_out"].keys()
    assert cases == {*gpu.gpu_layouts.CASES}
    assert found["layouts"]["Softmax"] == "loses channels_last"
    assert found["environment"]["accelerator"]
