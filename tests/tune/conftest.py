"""Tunings on a simulated clock."""

from dataclasses import replace

import pytest
import torch

from clocks import Clock, noisy
from prepare.stages.bench import compare, compare_variants
from prepare.stages.tune import tune_model


@pytest.fixture
def timed(monkeypatch):
    """Set the time of a call of each candidate, by name; the preparing and verifying is real."""
    means = {}
    monkeypatch.setattr(compare_variants, "environment", dict)

    def simulated(models, batch, *, train, **how):
        clock = Clock()
        variants = {name: clock.takes(noisy(means.get(name, 0.1), 0.002, name)) for name in models}
        how |= {"format": None, "budget": 30.0}
        found = compare(variants, torch.ones(1), _clock=clock, **how)
        return replace(found, settings={**found.settings, "train": train})

    monkeypatch.setattr(tune_model, "compare", simulated)
    return means
