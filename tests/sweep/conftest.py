"""A made-up sweep, for the tests of its summary."""

import pytest

import made
from prepare.app.sweep.summary import read_summary


@pytest.fixture
def sweep(tmp_path):
    """Makes a sweep of rows, each a mapping of what `add_row` takes beside its overrides."""

    def make(*rows):
        folder = tmp_path / "swept"
        made.plan(folder, [row.pop("overrides") for row in (dict(row) for row in rows)])
        for number, row in enumerate(rows):
            made.add_row(folder, number, **row)
        return read_summary(folder)

    return make
