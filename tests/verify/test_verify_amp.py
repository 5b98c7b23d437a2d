"""Test verifications under autocast: tolerances of its dtype, an exact reference, and no cached weights."""

import copy

import pytest
import torch
from torch import nn

from prepare.core.forward.torch_state import autocast
from prepare.errors import RefusedError
from prepare.pipeline import Pipeline
from prepare.stages.verify import verify
from verify_checks import FLAT, check, checks_by_kind, prepared

CPU = torch.device("cpu")


def net():
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3)]
    return nn.Sequential(*layers).train(), torch.randn(2, 3, 10, 10)


@pytest.mark.parametrize("amp", ["bfloat16", "float16"])
def test_the_tolerance_is_that_of_the_autocast_dtype(amp):
    model, batch = net()
    result = check(model, FLAT, batch, mode="train", amp=amp)
    assert (result.status, result.reason) == ("pass", "")
    assert (result.amp, result.reference) == (amp, "float32")
    outputs, plain = (
        checks_by_kind(each)["outputs"] for each in (result, check(model, FLAT, batch))
    )
    assert outputs.dtype == amp
    assert outputs.allowed > 100 * plain.allowed
    assert outputs.error > 100 * plain.error


def test_without_amp_a_surrounding_autocast_has_no_effect():
    model, batch = net()
    pipeline, model_prepared = prepared(model, FLAT)
    with torch.autocast("cpu", torch.bfloat16):
        result = verify(model, model_prepared, batch, pipeline=pipeline)
    assert result.amp == "none"
    assert checks_by_kind(result)["outputs"].error < 1e-5


def test_a_weight_that_autocast_has_cached_is_read_anew():
    layer, x = nn.Linear(4, 4, bias=False), torch.ones(1, 4)
    with torch.autocast("cpu", torch.bfloat16):
        before = layer(x)  # now the outer region holds a cast of the weight
        with torch.no_grad():
            layer.weight.mul_(2)
        assert torch.equal(layer(x), before)
        with autocast("bfloat16", CPU):
            assert torch.equal(layer(x), 2 * before)


@pytest.mark.parametrize("mode", ["eval", "train"])
@pytest.mark.parametrize("caches", [False, True])
def test_a_wrong_weight_fails_also_inside_a_region_that_caches(caches, mode):
    model, batch = net()
    pipeline, changed = prepared(model, FLAT)
    with torch.autocast("cpu", torch.bfloat16, enabled=caches):
        changed(batch)
        with torch.no_grad():
            changed[3].weight.mul_(1.2)
        result = verify(model, changed, batch, pipeline=pipeline, mode=mode, amp="bfloat16")
    assert result.status == "fail"


def test_an_unknown_amp_is_refused_with_the_words():
    model, batch = net()
    with pytest.raises(RefusedError, match="amp: 'float15' is not allowed; did you mean 'float16'"):
        verify(model, copy.deepcopy(model), batch, amp="float15")


def test_a_device_without_autocast_is_refused():
    with pytest.raises(RefusedError, match="torch has no autocast for meta"):
        autocast("bfloat16", torch.device("meta"))


def test_known_issues_are_those_of_the_autocast_dtype():
    pipeline = Pipeline.from_config({"conv3d_memory_format": {}})
    model = nn.Sequential(nn.Conv3d(2, 4, 3), nn.ReLU(), nn.Conv3d(4, 2, 3)).train()

    def names(amp):
        plan = pipeline.plan(model, amp=amp)
        texts = [*map(str, plan.errors), *map(str, plan.warnings)]
        return "conv3d_bfloat16_small_cpu" in " ".join(texts)

    assert names("bfloat16")
    assert not names("none")
