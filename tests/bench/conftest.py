"""A short bench, for tests that need its figures and not their precision."""

import pytest

from prepare.stages.bench import compare_variants
from prepare.stages.bench import time_prepared as levels


@pytest.fixture
def quick(monkeypatch):
    """Time no more rounds than a figure needs."""
    monkeypatch.setattr(levels, "BUDGET", 0.1)
    monkeypatch.setattr(compare_variants, "_MIN_SECONDS", 0.0)
