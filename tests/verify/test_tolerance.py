"""Test how large an error a verification allows."""

import copy

import pytest
import torch
from torch import nn

from prepare.stages.verify import verify
from processor import BFLOAT16
from verify_checks import PIPELINES, checks_by_kind, prepared
from verify_faults import Net


def test_bfloat16_is_allowed_the_error_of_bfloat16_and_no_more():
    model, batch = Net(), torch.randn(2, 3, 16, 16)
    pipeline, changed = prepared(model, PIPELINES["bfloat16"])
    assert verify(model, changed, batch, pipeline=pipeline).status == "pass"
    changed.up.register_forward_hook(lambda module, args, out: out * 1.3)
    result = verify(model, changed, batch, pipeline=pipeline)
    assert result.status == "fail"
    assert "steps.half.keep=[norms," in result.advice


class Shifted(nn.Module):
    """Adds a constant: 16-bit numbers far from zero have large errors; a second module subtracts it."""

    def __init__(self, by):
        super().__init__()
        self.by = by

    def forward(self, x):
        return x + self.by


@pytest.mark.skipif(not BFLOAT16, reason="here no convolution keeps the layout in bfloat16")
@pytest.mark.parametrize("mode", ["eval", "train"])
def test_a_missing_16_bit_kernel_is_cannot_tell_and_named(mode):
    reference = nn.Sequential(nn.Conv3d(2, 4, 3), nn.AvgPool3d(2)).train(mode == "train")
    batch = torch.randn(1, 2, 8, 8, 8)
    with pytest.raises(RuntimeError, match="BFloat16"):
        copy.deepcopy(reference).bfloat16()(batch.bfloat16())
    pipeline, model = prepared(reference, PIPELINES["bfloat16"])
    result = verify(reference, model, batch, pipeline=pipeline, mode=mode)
    assert result.status == "cannot tell"
    assert "1 (AvgPool3d)" in result.reason
    assert "BFloat16" in result.reason


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_the_rounding_error_of_large_numbers_is_allowed(mode):
    reference = nn.Sequential(
        nn.Conv3d(2, 4, 3), Shifted(64.0), Shifted(-64.0), nn.Conv3d(4, 2, 1)
    ).train(mode == "train")
    batch = torch.randn(1, 2, 8, 8, 8)
    pipeline, model = prepared(reference, PIPELINES["bfloat16"])
    result = verify(reference, model, batch, pipeline=pipeline, mode=mode)
    assert result.status == "pass", result.reason
    outputs = checks_by_kind(result)["outputs"]
    assert outputs.error > 4 * torch.finfo(torch.bfloat16).eps * 2**0.5  # more than the floor
    model[1].by = 70.0
    result = verify(reference, model, batch, pipeline=pipeline, mode=mode)
    assert result.status == "fail"


# ------------------------------------------------------------------------------------- sensitivity


def scaled_backward(factor):
    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, gradient):
            return gradient * factor

    return lambda module, args, out: Scale.apply(out)


@pytest.mark.parametrize("precision", PIPELINES)
def test_errors_around_the_reported_sensitivity_are_told_apart(precision):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.SiLU(), nn.Conv2d(8, 4, 3))
    batch = torch.randn(2, 3, 16, 16)
    pipeline, changed = prepared(model, PIPELINES[precision])
    clean = verify(model, changed, batch, pipeline=pipeline, mode="train")
    found, place = clean.sensitivity("gradients")
    assert place in {"0", "2", "input 0"}
    for times, status in ((0.2, "pass"), (4.0, "fail")):
        hook = changed[0].register_forward_hook(scaled_backward(1 + times * found))
        result = verify(model, changed, batch, pipeline=pipeline, mode="train")
        hook.remove()
        assert result.status == status
