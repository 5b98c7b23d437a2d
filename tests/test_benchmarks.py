"""Tests of the benchmark scripts, and of the tables that the pages show."""

import importlib
import re
import sys
from pathlib import Path

import pytest

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
