"""Test the status, the reason and the advice of a verification."""

import copy

import pytest
import torch
from torch import nn

from prepare.core.document import ReportContext
from prepare.pipeline import Pipeline
from prepare.stages.verify import verify
from prepare.stages.verify.document import verify_document
from verify_checks import FLAT, check, checks_by_kind, prepared
from verify_faults import Net


class Says(nn.Conv2d):
    def forward(self, x):
        return "nothing"


@pytest.mark.parametrize("bias", [float("nan"), float("inf"), None])
def test_outputs_without_finite_numbers_are_cannot_tell(bias):
    model = (Says if bias is None else nn.Conv2d)(3, 4, 3)
    nn.init.constant_(model.bias, bias or 0.0)
    assert check(model, FLAT, torch.randn(1, 3, 8, 8)).status == "cannot tell"


def zero_last():
    """Return a network whose last convolution starts with zeros, as that of a diffusion model."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.SiLU(), nn.Conv2d(4, 2, 3))
    for parameter in model[2].parameters():
        nn.init.zeros_(parameter)
    return model


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_outputs_that_are_all_zero_are_cannot_tell(mode):
    result = check(zero_last(), FLAT, torch.randn(1, 3, 8, 8), mode=mode)
    assert (result.status, checks_by_kind(result)["outputs"].status) == ("cannot tell",) * 2
    assert "all zero" in result.reason


class Rough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad + 3e-5 * grad.abs().max() * torch.linspace(-1, 1, grad.numel()).view_as(grad)


class MayBeRough(nn.Module):
    is_rough = False

    def forward(self, x):
        return Rough.apply(x) if self.is_rough else x.clone()


@pytest.mark.parametrize("is_rough", [False, True])
def test_gradients_that_eval_does_not_judge_are_not_called_right(is_rough):
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Conv2d(3, 4, 3), MayBeRough(), nn.Conv2d(4, 2, 3)).eval()
    other = copy.deepcopy(reference)
    other[1].is_rough = is_rough
    found = verify(reference, other, torch.randn(2, 3, 8, 8))
    status = checks_by_kind(found)["parameter gradients"].status
    assert (found.status, status) == ("pass", "skipped" if is_rough else "pass")
    answer = verify_document(ReportContext(found={"verify": found})).answers[0]
    assert ("gradients right" in answer.remark) is not is_rough


class Frozen(nn.Module):
    """A norm whose statistics are buffers."""

    def __init__(self, variance):
        super().__init__()
        self.register_buffer("var", torch.tensor(variance)[:, None, None])
        self.register_buffer("scale", torch.tensor([1.0, 1.0, 1e-4, 1.0])[:, None, None])

    def forward(self, x):
        return x * (self.scale * self.var.rsqrt())


def test_the_culprit_is_the_module_that_lost_its_value():
    reference = nn.Sequential(nn.Conv2d(3, 4, 1), Frozen([1.0, 1.0, 2e-8, 1.0]), nn.Conv2d(4, 4, 1))
    found = check(
        reference, {"half": {"keep": ["norms"]}, "input_format": {}}, torch.randn(2, 3, 8, 8)
    )
    assert (found.status, found.culprit) == ("fail", "1")
    assert "keep=[norms,1]" in found.advice


def test_cannot_tell_gives_the_reason_of_what_cannot_be_told():
    reference = nn.Conv2d(3, 4, 3)
    for parameter in reference.parameters():
        nn.init.zeros_(parameter)
    pipeline, model = prepared(reference, FLAT)
    model.weight.register_hook(lambda gradient: 2 * gradient)
    result = verify(reference, model, torch.randn(1, 3, 8, 8), pipeline=pipeline)
    assert "wrong" in {check.status for check in result.checks}
    assert (result.status, result.reason.partition(":")[0]) == ("cannot tell", "outputs")


def test_a_number_that_a_cast_made_infinite_fails():
    model = nn.Conv2d(3, 4, 3)
    with torch.no_grad():
        model.weight[0, 0, 0, :2] = torch.tensor([1e5, -1e6])
    # Not applied: `apply` refuses what overflows.
    pipeline = Pipeline.from_config({"half": {"dtype": "float16"}, "input_format": {}})
    cast = copy.deepcopy(model).half()
    result = verify(model, cast, torch.randn(1, 3, 8, 8), pipeline=pipeline)
    assert result.status == "fail"
    assert "weight differs" in result.reason
    cast.weight.data.clamp_(-65504.0, 65504.0)
    result = verify(model, cast, torch.randn(1, 3, 8, 8), pipeline=pipeline)
    assert checks_by_kind(result)["values"].status == "pass"


def test_a_lost_weight_layout_fails_only_with_a_pipeline():
    pipeline, model = prepared(Net(), FLAT)
    reference = copy.deepcopy(model)
    model.stem.weight.data = model.stem.weight.data.contiguous()
    batch = torch.randn(2, 3, 16, 16)
    assert verify(reference, model, batch).status == "pass"
    result = verify(reference, model, batch, pipeline=pipeline)
    assert (result.status, result.culprit) == ("fail", "stem.weight")
    assert "apply" in result.reason.partition(";")[2]
