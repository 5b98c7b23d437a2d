"""Test verifications under autocast: tolerances of its dtype, an exact reference, and no cached weights."""

import pytest
import torch
from torch import nn

from prepare.stages.verify import verify
from verify_checks import FLAT, check, checks_by_kind, prepared


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
    assert result.dtype == amp
    assert outputs.allowed > 100 * plain.allowed
    assert outputs.error > 100 * plain.error


def test_without_amp_a_surrounding_autocast_has_no_effect():
    model, batch = net()
    pipeline, model_prepared = prepared(model, FLAT)
    with torch.autocast("cpu", torch.bfloat16):
        result = verify(model, model_prepared, batch, pipeline=pipeline)
    assert result.amp == "none"
    assert checks_by_kind(result)["outputs"].error < 1e-5
