"""Tunings on a simulated clock."""

import math
import random

import pytest

from prepare.stages.tune import session
from prepare.stages.tune.candidate_run import PreparedCandidate


@pytest.fixture
def timed(monkeypatch):
    """Set the time of a call of each candidate, by name; all else is real."""
    means = {}

    class Timed(PreparedCandidate):
        def __init__(self, tuning, candidate, pool, **how):
            super().__init__(tuning, candidate, pool, **how)
            self._mean = means.get(candidate.name, 0.1)
            self._order, self.seconds = random.Random(candidate.name), 1e-3

        def turn(self, number):
            return self._mean * math.exp(self._order.gauss(0, 0.002))

    monkeypatch.setattr(session, "PreparedCandidate", Timed)
    return means
