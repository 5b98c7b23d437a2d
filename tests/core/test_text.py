"""Texts for users: words of the command line and of Python, capitals, cells of a table, remarks of others."""

import csv
import doctest
import io

import pytest

from prepare.core.utils import text as wording
from prepare.core.utils.text import csv_text
from prepare.pipeline import pipeline

FORCED = {"force": True, "include": ["a"]}
WORDS = [
    (lambda: wording.step("half"), "+steps.half={}", '"half": {}'),
    (lambda: wording.step("repair_layout", **FORCED),
     "+steps.repair_layout={force:true,include:[a]}", '"repair_layout": {"force": True, "include": ["a"]}'),
    (lambda: wording.option("half", "keep", ["norms", "head"]),
     "steps.half.keep=[norms,head]", '"half": {"keep": ["norms", "head"]}'),
    (lambda: wording.option("half", "keep", [...]), "steps.half.keep=[...]", '"half": {"keep": [...]}'),
    (lambda: wording.dropped("compile"), "steps.compile=null", '"compile": None'),
    (lambda: wording.argument("verify", None), "verify=null", "verify=None"),
    (lambda: wording.argument("bench", "full"), "bench=full", 'bench="full"'),
    (wording.inference_mode, "choose mode=eval", "call model.eval() first"),
    (wording.in_training, " (mode=train)", ""),
]  # fmt: skip


@pytest.mark.parametrize(("write", "cli", "python"), WORDS, ids=[python for *_, python in WORDS])
def test_a_setting_is_written_for_its_user(write, cli, python):
    assert write() == python
    with wording.command_line_words():
        assert write() == cli
    assert write() == python


def test_a_cell_with_line_ends_and_separators_stays_one_cell():
    rows = [["a;b", "a,b", "new\nline", None], ["a\rb", '"', "\udc80", -1e-9]]
    again = list(csv.reader(io.StringIO(csv_text(rows), newline="")))
    assert again == [["a;b", "a,b", "new\nline", ""], ["a\rb", '"', "\\udc80", "-1e-09"]]


@pytest.mark.parametrize("module", [pipeline], ids=lambda m: m.__name__)
def test_the_examples_in_the_docstrings_run(module):
    failed, tried = doctest.testmod(module)
    assert tried > 0
    assert failed == 0
