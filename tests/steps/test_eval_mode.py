"""The step eval_mode, for a whole model and for a part of it."""

import pytest
import torch
from torch import nn

from prepare.app.job.settings import read_settings
from prepare.errors import ConfigError
from prepare.pipeline import Pipeline

FROZEN = Pipeline.from_config({"eval_mode": {"include": ["norms"]}})


def net():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5)).train()


def test_without_patterns_the_whole_model_is_in_eval_mode():
    model = Pipeline.from_config({"eval_mode": {}}).apply(net())
    assert not any(module.training for module in model.modules())


def test_with_patterns_a_part_of_the_model_is_in_eval_mode():
    model = FROZEN.apply(net())
    assert [m.training for m in model.modules()] == [True, True, False, True]
    model = Pipeline.from_config({"eval_mode": {"exclude": ["0", "1"]}}).apply(net())
    assert [m.training for m in model.modules()] == [False, True, True, False]


def test_a_frozen_norm_keeps_its_statistics_and_trains_its_weight():
    model = FROZEN.apply(net())
    before = model[1].running_mean.clone()
    model(torch.randn(4, 3, 8, 8)).sum().backward()
    assert torch.equal(model[1].running_mean, before)
    assert model[1].weight.grad is not None


def test_model_train_reverts_it_and_check_reports_it():
    model = FROZEN.apply(net())
    assert not FROZEN.check(model)
    model.train()
    assert [drift.where for drift in FROZEN.check(model)] == ["1"]


def test_norms_in_eval_mode_are_fused_by_the_next_step():
    model = net()
    Pipeline.from_config({"eval_mode": {}, "fuse_conv_bn": {}}).apply(model)
    assert type(model[1]) is nn.Identity


def settings(options, mode):
    config = {
        "model": {"_target_": "torch.nn.Identity"},
        "steps": {"eval_mode": options},
        "mode": mode,
    }
    return read_settings(config, choices={})


def test_eval_mode_of_the_whole_model_with_mode_train_is_an_error():
    message = "^steps.eval_mode: puts the whole model in evaluation mode, and .*not trained"
    with pytest.raises(ConfigError, match=message):
        settings({}, "train")
    settings({}, "eval")
    settings({"include": ["norms"]}, "train")
    settings({"exclude": ["head"]}, "train")
