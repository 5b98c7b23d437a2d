"""Test the groups `verify` and `bench`: levels, limits, and where the limits arrive."""

import pytest
import torch
from prepare.job.levels import VerifyLimits, read_levels
from torch import nn

from prepare.job.settings import read_settings
from prepare.verify import check_model as checks
from prepare.verify import verify

MODEL = {"_target_": "prepare.models.unet.UNet3d"}


@pytest.mark.parametrize("value", ["full", {"level": "full"}])
def test_a_level_is_a_word_or_in_a_mapping(value):
    settings = read_settings({"model": MODEL, "verify": value, "bench": value}, choices={})
    assert (settings.verify, settings.bench) == ("full", "full")
    assert settings.verify_limits == VerifyLimits()


@pytest.mark.parametrize(
    ("memory", "count"),
    [("8GiB", 8 << 30), (1000, 1000), ("1.5 GB", 3 << 29), ("500 bytes", None), (0, None)],
)
def test_a_memory_limit_has_a_unit_or_is_in_bytes(memory, count):
    read, problems = read_levels({"verify": {"memory": memory, "seconds": 5}})
    assert read["verify_limits"] == VerifyLimits(seconds=5.0, memory=count)
    assert [problem.where for problem in problems] == ([] if count else ["verify.memory"])


@pytest.mark.parametrize("value", [True, "1", 0])
def test_a_wrong_time_limit_is_a_problem(value):
    _, problems = read_levels({"bench": {"level": "short", "seconds": value}})
    assert [problem.where for problem in problems] == ["bench.seconds"]


def test_the_default_memory_limit_is_half_of_what_is_free(monkeypatch):
    monkeypatch.setattr(checks, "free_memory", lambda _: 2000)
    model = nn.Sequential(nn.Conv2d(3, 4, 3))
    reference = nn.Sequential(nn.Conv2d(3, 4, 3))
    reference.load_state_dict(model.state_dict())
    found = verify(reference, model, torch.ones(1, 3, 8, 8))
    assert "the limit is 1000 bytes; raise verify.memory" in found.reason
    monkeypatch.setattr(checks, "free_memory", lambda _: None)
    assert verify(reference, model, torch.ones(1, 3, 8, 8)).status == "pass"
