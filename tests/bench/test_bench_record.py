"""The record of a bench: saved, loaded, refused, in sentences and on its page."""

import json

import pytest
import torch

from clocks import Clock, noisy
from made import comparison
from prepare.stages.bench import Comparison, compare
from prepare.stages.bench.document import speed_sentence

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


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (comparison(), ("1.4x faster", "29.2", "40.0 ms", "1.32x to 1.43x")),
        (comparison(1.0, verdict="no difference", interval=(0.98, 1.02)), ("no difference", "1.02x slower")),
        (comparison(verdict="unclear", interval=None), ("unclear",)),
        (comparison(1.2, verdict="slower", interval=(1.1, 1.3)), ("1.2x slower", "48.0")),
    ],
)  # fmt: skip
def test_a_comparison_is_described_in_one_sentence(found, said):
    assert all(word in speed_sentence(found) for word in said)
