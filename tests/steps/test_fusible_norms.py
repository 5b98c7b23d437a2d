"""Norms that fuse_conv_bn finds, and those that it must not fuse."""

import pytest
import torch
from torch import nn

from fuse_checks import FUSE, Net, lively
from small_nets import facts


def planned(model):
    return [name for action in FUSE.plan(model).actions for name in action.modules]


def why(model):
    return " ".join(map(str, FUSE.plan(model).warnings))


def test_modules_that_cannot_be_traced_are_searched_by_parts():
    net = Net(lambda net, x: net.block(x) if x.sum() > 0 else net.block(-x))
    net.block = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    assert planned(lively(net)) == ["block.1", "block.0"]


@pytest.mark.parametrize("name", ["forward", "_conv_forward"])
def test_a_convolution_with_an_own_method_on_the_object_is_not_fused(name):
    net = lively(Net())
    method = getattr(net.conv, name)
    setattr(net.conv, name, lambda *given: method(*given).relu())
    assert planned(net) == []


NOT_ALONE = {
    "its output is added": lambda net, x: net.bn(y := net.conv(x)) + y,
    "its output is given out": lambda net, x: (net.bn(y := net.conv(x)), y),
    "called twice": lambda net, x: net.bn(net.conv(x)) + net.conv(x),
    "norm called twice": lambda net, x: net.bn(net.bn(net.conv(x))),
    "something between": lambda net, x: net.bn(net.conv(x).relu()),
    "changed in place": lambda net, x: net.bn(net.conv(x).mul_(2)),
    "its weight is used": lambda net, x: net.bn(net.conv(x)) * net.conv.weight.mean(),
    "the norm's weight is used": lambda net, x: net.bn(net.conv(x)) * net.bn.weight.mean(),
    "put aside": lambda net, x: net.bn(setattr(net, "seen", y := net.conv(x)) or y),
    "put aside in a list": lambda net, x: net.bn(net.seen.append(y := net.conv(x)) or y),
    "writes into tensors": lambda net, x: net.bn(y := net.conv(x)) + y * net.calls.add_(1) * net.aside.add_(1),
    "a branch": lambda net, x: net.bn(net.conv(x)) if x.sum() > 0 else net.conv(x),
}  # fmt: skip


@pytest.mark.parametrize("call", NOT_ALONE.values(), ids=NOT_ALONE)
def test_a_convolution_with_a_second_consumer_is_not_fused(call):
    net = lively(Net(call))
    net.register_buffer("calls", torch.zeros(()))
    net.seen, net.aside = [], torch.zeros(())
    before = facts(net), sorted(vars(net)), list(net.seen), float(net.aside)
    assert planned(net) == []
    assert "1 batch norm not fused (bn): no convolution was found" in why(net)
    assert (facts(net), sorted(vars(net)), net.seen, net.aside) == before


class Optional(Net):
    """An argument decides whether the convolution's output goes only to the norm."""

    def forward(self, x, skip=None):
        y = self.conv(x)
        return self.bn(y) if skip is None else self.bn(y) + y


def test_pairs_that_depend_on_an_optional_argument_are_not_fused():
    assert planned(lively(Optional())) == []


def without_statistics(net):
    net.bn = nn.BatchNorm2d(4, track_running_stats=False).eval()


def shared_weight(net):
    net.other = nn.Conv2d(3, 4, 3).eval()
    net.other.weight = net.conv.weight


UNFIT = {
    "training mode": lambda net: net.bn.train(),
    "convolution before it, has hooks or is in training mode": lambda net: net.conv.train(),
    "has no running statistics": without_statistics,
    "has hooks": lambda net: net.conv.register_forward_hook(lambda *_: None),
    "before it, has hooks": lambda net: net.bn.register_forward_pre_hook(lambda *_: None),
    "no convolution": lambda net: nn.utils.parametrizations.weight_norm(net.conv),
    "shares a tensor": shared_weight,
    "different devices": lambda net: net.bn.to("meta"),
}


@pytest.mark.parametrize("reason", UNFIT)
def test_the_plan_gives_the_reason_for_each_unfused_norm(reason):
    net = lively(Net())
    UNFIT[reason](net)
    assert planned(net) == []
    assert reason in why(net)


class Scaled(nn.BatchNorm2d):
    """A norm with another forward."""

    def forward(self, x):
        return super().forward(x) * 2


OTHERS = {
    "a norm of one's own": (nn.Conv2d(3, 4, 3), Scaled(4)),
    "grouped and transposed": (nn.ConvTranspose2d(4, 4, 2, groups=4), nn.BatchNorm2d(4)),
    # Of an input (batch, 4, 4) the norm's channels are not the layer's features.
    "linear": (nn.Linear(4, 4), nn.BatchNorm1d(4)),
    "an instance norm": (nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4, track_running_stats=True)),
}


@pytest.mark.parametrize(("conv", "bn"), OTHERS.values(), ids=OTHERS)
def test_other_kinds_of_modules_are_not_fused(conv, bn):
    assert planned(Net(conv=conv, bn=bn).eval()) == []
