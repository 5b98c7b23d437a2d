"""A short bench, for tests that need its figures and not their precision."""

import pytest

from prepare.stages.bench import session
from prepare.stages.bench import time_prepared as levels
from prepare.stages.bench.samples import SampleSet


@pytest.fixture
def quick(monkeypatch):
    """Time no more rounds than a figure needs."""
    monkeypatch.setattr(levels, "PRECISION", {"short": 0.99, "full": 0.99})
    monkeypatch.setattr(session, "_MIN_SECONDS", 0.0)
    monkeypatch.setattr(session, "LOOKS", (8,))
    monkeypatch.setattr(SampleSet, "is_settled", lambda _: True)
