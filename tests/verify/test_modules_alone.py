"""Test that modules which are compared alone show errors that the whole model hides in its noise."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from prepare.stages.verify import verify
from prepare.stages.verify.document import verify_sentence
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


def patiently(reference, model, pipeline, **options):
    """Verify with time enough for a busy machine."""
    options = {"mode": "train", "seconds": 600.0, **options}
    return verify(reference, model, BATCH, pipeline=pipeline, **options)


def verified(reference, place, factor, steps=FLAT, **options):
    pipeline, model = prepared(reference, steps)
    module = model.get_submodule(place)
    module.register_forward_hook(lambda _m, _a, out: ScaledBackward.apply(out, factor))
    return patiently(reference, model, pipeline, **options)


def test_a_small_error_of_one_backward_is_found_where_kinks_hide_it():
    result = verified(kinked(), "2", 1.003)
    checks = checks_by_kind(result)
    assert checks["parameter gradients"].status == "pass"
    assert (result.status, checks["module gradients"].status) == ("fail", "fail")
    assert (result.culprit, checks["module gradients"].worst) == ("2", "2")
    assert "module gradients: 2 is off by 0.003" in result.reason


@pytest.mark.parametrize("precision", PIPELINES)
def test_a_clean_network_with_kinks_passes_and_reports_what_it_finds(precision):
    result = check(kinked(), PIPELINES[precision], BATCH, mode="train", seconds=600.0)
    assert (result.status, result.reason) == ("pass", "")
    assert result.sensitivity("gradients")[0] < (0.001 if precision == "float32" else 0.2)
    assert ("7 modules alone" in verify_sentence(result)) == (precision == "bfloat16")


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
    assert patiently(reference, model, pipeline).status == "pass"
    model.block.factor = 1.003
    result = patiently(reference, model, pipeline)
    assert (result.status, result.culprit) == ("fail", type(model).__name__)


class Skip(nn.Module):
    """A convolution and a norm, with a skip; both run again in backward if `recomputed`."""

    def __init__(self, *, recomputed=None):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.recomputed = recomputed

    def inner(self, x):
        return torch.relu(self.norm(self.conv(x)))

    def forward(self, x):
        if self.recomputed is None:
            return x + self.inner(x)
        return x + checkpoint(self.inner, x, use_reentrant=self.recomputed == "reentrant")


def blocks(recomputed=None):
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3), *(Skip(recomputed=recomputed) for _ in range(3))]
    return nn.Sequential(*layers, nn.Conv2d(8, 4, 1))


@pytest.mark.parametrize("place", ["0", pytest.param("2.conv", marks=pytest.mark.slow), "4"])
@pytest.mark.parametrize("recomputed", [None, "reentrant", "not reentrant"])
@pytest.mark.parametrize(
    "how",
    [
        ("eval", "none"),
        ("train", "none"),
        pytest.param(("train", "bfloat16"), marks=pytest.mark.slow),
    ],
)
def test_the_first_wrong_module_is_the_one_that_is_wrong_alone(how, recomputed, place):
    reference = blocks(recomputed)
    pipeline, model = prepared(reference, FLAT)
    model.get_submodule(place).register_forward_hook(lambda _m, _a, out: out * 2.0)
    result = patiently(reference, model, pipeline, mode=how[0], amp=how[1])
    assert (result.status, result.culprit) == ("fail", place)


class OneChannel(nn.Module):
    """The two branches of a block of nnU-Net, over an image of one channel."""

    def __init__(self):
        super().__init__()
        self.main, self.skip = (
            nn.Sequential(nn.Conv2d(1, 12, size, padding=size // 2), nn.InstanceNorm2d(12))
            for size in (3, 1)
        )
        self.last = nn.Conv2d(12, 4, 3)

    def forward(self, x):
        return self.last((self.main(x) + self.skip(x)).relu())


def test_an_input_of_one_channel_keeps_its_format_while_modules_are_recorded():
    pipeline, model = prepared(reference := OneChannel(), PIPELINES["float32"])
    model.last.register_forward_hook(lambda _m, _a, out: ScaledBackward.apply(out, 1.5))
    result = verify(reference, model, BATCH[:1, :1], pipeline=pipeline, mode="train")
    assert result.culprit == checks_by_kind(result)["module gradients"].worst == "last"
