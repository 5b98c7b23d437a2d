"""Test the groups `verify` and `bench`: levels, limits, and where the limits arrive."""

import pytest
import torch
from torch import nn

from made_works import work
from prepare.app.job.settings import read_settings
from prepare.core.forward.example_input import Example
from prepare.errors import ConfigError
from prepare.stages.registry import STAGES
from prepare.stages.verify import budget, verify

MODEL = {"_target_": "prepare.models.unet.UNet3d"}


@pytest.mark.parametrize("value", ["full", {"level": "full"}])
def test_a_level_is_a_word_or_in_a_mapping(value):
    settings = read_settings({"model": MODEL, "verify": value, "bench": value}, choices={})
    for name in ("verify", "bench"):
        assert settings.stages[name] == STAGES[name](level="full")


@pytest.mark.parametrize(
    ("memory", "count"), [("8GiB", 8 << 30), (1000, 1000), ("1.5 GB", 3 << 29)]
)
def test_a_memory_limit_has_a_unit_or_is_in_bytes(memory, count, monkeypatch):
    config = {"model": MODEL, "verify": {"memory": memory, "seconds": 5}}
    stage = read_settings(config, choices={}).stages["verify"]
    seen = []
    monkeypatch.setattr("prepare.stages.verify.verify", lambda *_, **limits: seen.append(limits))
    stage.run(work(reference=nn.Conv2d(3, 4, 3), example=Example((torch.ones(1, 3, 8, 8),))))
    assert (seen[0]["memory"], seen[0]["seconds"]) == (count, 5.0)


@pytest.mark.parametrize("memory", ["500 bytes", 0])
def test_a_wrong_memory_limit_is_a_problem(memory):
    with pytest.raises(ConfigError, match=r"^verify\.memory: "):
        STAGES["verify"].from_options({"memory": memory}, {})


@pytest.mark.parametrize("value", [True, "1", 0])
def test_a_wrong_time_limit_is_a_problem(value):
    with pytest.raises(ConfigError, match=r"^bench\.seconds: "):
        STAGES["bench"].from_options({"level": "short", "seconds": value}, {})


def test_the_default_memory_limit_is_half_of_what_is_free(monkeypatch):
    monkeypatch.setattr(budget, "free_memory", lambda _: 2000)
    model = nn.Sequential(nn.Conv2d(3, 4, 3))
    reference = nn.Sequential(nn.Conv2d(3, 4, 3))
    reference.load_state_dict(model.state_dict())
    found = verify(reference, model, torch.ones(1, 3, 8, 8))
    assert "raise verify.memory" in found.reason
    monkeypatch.setattr(budget, "free_memory", lambda _: None)
    assert verify(reference, model, torch.ones(1, 3, 8, 8)).status == "pass"
