"""Test what a verification looks for beside results: other numbers at each call, a changed batch, one memory."""

import pytest
import torch
from torch import nn

from prepare.stages.verify import verify
from stateful_nets import STATEFUL
from verify_checks import FLAT, check, prepared

BATCH = torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(0))


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.SiLU(), nn.Conv2d(4, 4, 3))


def changed(forward):
    """Return a network, and a preparation of it whose forward is `forward(own_forward, x)`."""
    reference = net()
    pipeline, model = prepared(reference, FLAT)
    own = model.forward
    model.forward = lambda x: forward(own, x)
    return reference, model, pipeline


def kinds(result, status):
    return {item.what for item in result.checks if item.status == status}


@pytest.mark.parametrize("mode", ["eval", "train"])
@pytest.mark.parametrize(("every", "first"), [(2, 0), (2, 1), (3, 0), (3, 1), (3, 2)])
def test_a_model_that_is_wrong_in_every_second_or_third_call_is_told_so(mode, every, first):
    calls = iter(range(first, 1000))
    reference, model, pipeline = changed(
        lambda own, x: own(x) * (1.0 if next(calls) % every else 1.01)
    )
    result = verify(reference, model, BATCH, pipeline=pipeline, mode=mode)
    assert result.status == "cannot tell"
    assert "the prepared model differs between its own calls" in result.reason


def test_nan_in_every_second_call_does_not_pass():
    calls = iter(range(1000))
    reference, model, pipeline = changed(
        lambda own, x: own(x) * (float("nan") if next(calls) % 2 else 1.0)
    )
    assert verify(reference, model, BATCH, pipeline=pipeline).status != "pass"


class RaisesBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.view(-1).view(gradient.shape)


def test_a_backward_that_raises_is_no_wrong_forward_in_eval():
    class Net(nn.Sequential):
        def forward(self, x):
            return self[1](RaisesBackward.apply(self[0](x)))

    reference = Net(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3))
    found = check(reference, FLAT, BATCH)
    assert found.status == "pass"
    assert kinds(found, "skipped") >= {"input gradients", "parameter gradients"}
    assert any("view size is not compatible" in item.note for item in found.checks)
    assert check(reference, FLAT, BATCH, mode="train").status == "fail"


@pytest.mark.parametrize("name", sorted(set(STATEFUL) - {"Draws", "InPlaceInput", "Flags"}))
def test_a_model_that_changes_its_own_values_is_right(name):
    reference = nn.Sequential(nn.Conv2d(3, 4, 1), STATEFUL[name](), nn.Conv2d(4, 4, 1)).eval()
    assert check(reference, FLAT, BATCH).status == "pass"
