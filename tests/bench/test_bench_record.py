"""The record of a bench: saved, loaded, refused, in sentences and on its page."""

import json

import pytest
import torch

from clocks import Clock, noisy
from prepare.stages.bench import Comparison, compare

BATCH = torch.ones(4, 3)


@pytest.fixture(scope="module")
def found():
    clock = Clock()
    variants = {
        name: clock.takes(noisy(mean, 0.01, name))
        for name, mean in {"plain": 0.1, "quick": 0.05, "same": 0.1}.items()
    }
    variants["broken"] = clock.takes(0.1, breaks_at=1)
    return compare(variants, BATCH, budget=60, _clock=clock)


def test_a_comparison_survives_saving_and_loading(found, tmp_path):
    found.save(tmp_path / "bench.json")
    assert Comparison.load(tmp_path / "bench.json") == found
    data = json.loads((tmp_path / "bench.json").read_text())
    assert (data["format"], data["version"]) == ("prepare.bench", 1)
    assert data["environment"]["threads"] == torch.get_num_threads()
    known = {"threads", "cores_available", "others", "timer", "seed"}
    assert known <= data["settings"].keys()
