"""Texts for users: cells of a table, remarks of others."""

import csv
import doctest
import io

import pytest

from prepare.core.utils.text import csv_text
from prepare.pipeline import pipeline


def test_a_cell_with_line_ends_and_separators_stays_one_cell():
    rows = [["a;b", "a,b", "new\nline", None], ["a\rb", '"', "\udc80", -1e-9]]
    again = list(csv.reader(io.StringIO(csv_text(rows), newline="")))
    assert again == [["a;b", "a,b", "new\nline", ""], ["a\rb", '"', "\\udc80", "-1e-09"]]


@pytest.mark.parametrize("module", [pipeline], ids=lambda m: m.__name__)
def test_the_examples_in_the_docstrings_run(module):
    failed, tried = doctest.testmod(module)
    assert tried > 0
    assert failed == 0
