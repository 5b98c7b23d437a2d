"""Test that modules which are compared alone show errors that the whole model hides in its noise."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from prepare.report.sentences import verify_sentence
from prepare.verify import verify
from prepare.verify.execution.module_calls import CallInterceptor
from prepare.verify.module_checks import without_proof
from prepare.verify.records import Check
from verify_checks import FLAT, PIPELINES, check, checks_by_kind, prepared


class ScaledBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.factor, None


def kinked():
    """Return a network whose gradients are noisy on BATCH, since the inputs of its ReLU cancel.

    Channel 0 of the third convolution is the difference of two equal numbers: rounding alone decides where
    the ReLU passes the gradient.
    """
    torch.manual_seed(0)
    first, second, third = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 3)
    with torch.no_grad():
        for conv in (first, second):
            kernel, conv.bias[1] = conv.weight[0, 0].clone(), conv.bias[0]
            conv.weight[:2] = 0.0
            conv.weight[0, 0] = conv.weight[1, 1] = kernel
        third.weight[0, 1], third.weight[0, 2:], third.bias[0] = -third.weight[0, 0], 0.0, 0.0
    act = nn.ReLU(inplace=True)
    return nn.Sequential(first, nn.SiLU(), second, nn.SiLU(), third, act, nn.Conv2d(8, 4, 3))


BATCH = torch.randn(2, 3, 24, 24, generator=torch.Generator().manual_seed(0))
BATCH[:, 1] = BATCH[:, 0]


def verified(reference, place, factor, steps=FLAT, **options):
    pipeline, model = prepared(reference, steps)
    module = model.get_submodule(place)
    module.register_forward_hook(lambda _m, _a, out: ScaledBackward.apply(out, factor))
    return verify(reference, model, BATCH, pipeline=pipeline, mode="train", **options)


def test_a_small_error_of_one_backward_is_found_where_kinks_hide_it():
    result = verified(kinked(), "2", 1.003)
    checks = checks_by_kind(result)
    assert checks["parameter gradients"].status == "pass"
    assert (result.status, checks["module gradients"].status) == ("fail", "fail")
    assert (result.culprit, checks["module gradients"].worst) == ("2", "2")
    assert "module gradients (train mode, batch 2): 2 is off by 0.003" in result.reason


def test_a_small_error_of_one_filter_is_found():
    factor = torch.ones(1, 8, 1, 1)
    factor[0, 3] = 1.01
    assert verified(kinked(), "2", factor).culprit == "2"


def test_a_clean_network_with_kinks_passes_and_reports_what_it_finds():
    result = check(kinked(), FLAT, BATCH, mode="train")
    found, _ = result.sensitivity("gradients")
    whole = checks_by_kind(result)["parameter gradients"]
    assert (result.status, result.reason) == ("pass", "")
    assert found < 0.001 < whole.sensitivity
    assert "modules alone against float64" in verify_sentence(result)


def test_errors_in_bfloat16_are_found_in_the_module_that_makes_them():
    result = verified(kinked(), "2", 1.2, PIPELINES["bfloat16"])
    assert (result.status, result.culprit) == ("fail", "2")


class Block(nn.Module):
    """Calls its children by name, nested, twice, and with a residual; computes between them."""

    def __init__(self):
        super().__init__()
        self.conv, self.act = nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(inplace=True)
        self.factor = 1.0

    def forward(self, x, *, scale):
        y = self.act(self.conv(self.act(self.conv(x))) * scale["by"])
        return {"out": ScaledBackward.apply(y, self.factor) + x, "aside": (y.detach(), 3)}


class WithBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.block = nn.Conv2d(3, 8, 3), Block()

    def forward(self, x):
        return self.block(self.stem(x), scale={"by": 0.5})["out"]


def test_an_error_between_modules_is_found_at_their_caller():
    reference = WithBlock()
    pipeline, model = prepared(reference, FLAT)
    assert verify(reference, model, BATCH, pipeline=pipeline, mode="train").status == "pass"
    model.block.factor = 1.003
    result = verify(reference, model, BATCH, pipeline=pipeline, mode="train")
    assert (result.status, result.culprit) == ("fail", "block")


class DropsAChild(nn.Sequential):
    """In the reference computes the ReLU itself, so its own code cannot be compared alone."""

    def forward(self, x):
        x = self[0](x)
        return self[2](self[1](x) if self[0].weight.is_contiguous() else x.relu())


def test_a_module_that_cannot_run_alone_is_named():
    torch.manual_seed(0)
    reference = DropsAChild(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))
    pipeline, model = prepared(reference, PIPELINES["bfloat16"])
    result = verify(reference, model, BATCH, pipeline=pipeline, mode="train")
    module_check = checks_by_kind(result)["module gradients"]
    assert result.status == "pass", result.reason
    assert "1 module not compared alone, first the model itself: " in module_check.note
    whole = [c.sensitivity for c in result.checks if c.what.endswith("r gradients")]
    assert module_check.sensitivity >= max(whole)


def test_calls_of_modules_are_intercepted_only_inside_the_block():
    original = nn.Module.__call__
    with CallInterceptor():
        assert nn.Module.__call__ is not original
    assert nn.Module.__call__ is original


@pytest.mark.parametrize(
    ("dtype", "alone", "garbage", "status"),
    [
        (torch.float32, "pass", False, "cannot tell"),
        (torch.float32, "fail", False, "fail"),
        (torch.float32, "pass", True, "fail"),
        (torch.float64, "pass", False, "fail"),
    ],
)
def test_a_failure_without_float64_is_never_a_pass(dtype, alone, garbage, status):
    what = "parameter gradients"
    item = SimpleNamespace(exceeds=True, is_beyond_noise=garbage, note="")
    comparison = SimpleNamespace(
        exact_dtype=dtype,
        runner=SimpleNamespace(exact_raised=False),
        differences={what: [item]},
        exceeding=lambda _: [item],
    )
    modules = [Check(what=f"module {kind}", status=alone) for kind in ("outputs", "gradients")]
    (found,) = without_proof(comparison, [Check(what=what, status="fail")], modules)
    assert found.status == status
