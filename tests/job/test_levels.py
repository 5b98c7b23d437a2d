"""Test the groups `verify` and `bench`: levels, limits, and where the limits arrive."""

import pytest
import torch
from torch import nn

from made_works import work
from prepare.app.job.settings import read_settings
from prepare.core.forward.example_input import Example
from prepare.errors import ConfigError
from prepare.stages.stage import STAGES

MODEL = {"_target_": "prepare.models.unet.UNet3d"}


@pytest.mark.parametrize("value", ["none", {"level": "none"}])
def test_a_level_is_a_word_or_in_a_mapping(value):
    settings = read_settings({"model": MODEL, "verify": value, "bench": value}, choices={})
    for name in ("verify", "bench"):
        assert settings.stages[name] == STAGES[name](level="none")


@pytest.mark.parametrize(
    ("given", "seconds", "copies"), [({"seconds": 5}, 5.0, "always"), ("short", None, "small")]
)
def test_the_users_time_arrives_and_copies_a_large_model(given, seconds, copies, monkeypatch):
    stage = read_settings({"model": MODEL, "verify": given}, choices={}).stages["verify"]
    seen = []
    monkeypatch.setattr("prepare.stages.verify.verify", lambda *_, **limits: seen.append(limits))
    stage.run(work(reference=nn.Conv2d(3, 4, 3), example=Example((torch.ones(1, 3, 8, 8),))))
    assert (seen[0]["seconds"], stage.needs_reference()) == (seconds, copies)


@pytest.mark.parametrize("value", [True, "1", 0])
def test_a_wrong_time_limit_is_a_problem(value):
    with pytest.raises(ConfigError, match=r"^bench\.seconds: "):
        STAGES["bench"].from_options({"level": "short", "seconds": value}, {})
