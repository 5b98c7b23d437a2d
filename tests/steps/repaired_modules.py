"""Modules with a repair, beside torch's own."""

import copy

import torch
from torch import nn

from prepare.core.model.memory_format import canonical_stride
from prepare.steps.repairs import find_repair

NAMES = {4: "channels_last", 5: "channels_last_3d"}


POOLS = {
    "avg": lambda: nn.AvgPool3d(2),
    "avg overlapping": lambda: nn.AvgPool3d((3, 2, 4), (2, 1, 3), (1, 0, 2)),
    "avg ceil": lambda: nn.AvgPool3d(3, 2, 1, ceil_mode=True),
    "avg with a divisor": lambda: nn.AvgPool3d(3, 2, (1, 0, 1), divisor_override=5),
    "power 2": lambda: nn.LPPool3d(2, 2),
    "power 3": lambda: nn.LPPool3d(3.0, (2, 3, 2), 1, ceil_mode=True),
    "adaptive avg": lambda: nn.AdaptiveAvgPool3d((3, 2, 4)),
    "adaptive avg to one": lambda: nn.AdaptiveAvgPool3d(1),
    "adaptive max": lambda: nn.AdaptiveMaxPool3d((3, 2, 4)),
    "adaptive avg 2-d to one": lambda: nn.AdaptiveAvgPool2d(1),
}
# torch 2.5 and 2.8 give NaN or 1.
if nn.LPPool3d(float("inf"), 2)(torch.full((1, 1, 2, 2, 2), 2.0)).item() == 2.0:
    POOLS["infinite power"] = lambda: nn.LPPool3d(float("inf"), 2)


SOFTMAXES = {
    "softmax": lambda: nn.Softmax(1),
    "softmax over the batch": lambda: nn.Softmax(0),
    "softmin": lambda: nn.Softmin(1),
    "log_softmax": lambda: nn.LogSoftmax(1),
    "softmax2d": lambda: nn.Softmax2d(),
}


CONVOLUTIONS = {
    "plain": lambda: nn.Conv3d(4, 6, 3, padding=1),
    "one output": lambda: nn.Conv3d(4, 1, 3, bias=False),
    "same, of even kernels": lambda: nn.Conv3d(4, 6, (2, 3, 4), padding="same"),
    "strided": lambda: nn.Conv3d(4, 6, 3, stride=(2, 1, 2), padding=(1, 0, 2)),
    "dilated": lambda: nn.Conv3d(4, 6, 3, dilation=(1, 2, 1), padding=2),
    "circular": lambda: nn.Conv3d(4, 6, 3, padding=1, padding_mode="circular"),
    "product": lambda: nn.Conv3d(4, 6, 1),
    "padded product": lambda: nn.Conv3d(4, 6, 1, padding=1),
    "transposed": lambda: nn.ConvTranspose3d(4, 16, 2, 2),
    "transposed, padded": lambda: nn.ConvTranspose3d(4, 16, 3, 2, 1, (1, 0, 1), bias=False),
    "transposed, depthwise": lambda: nn.ConvTranspose3d(4, 4, 3, 2, 1, (1, 0, 1), groups=4),
}


def of_size(module, *sizes):
    """Return a module that says how large its samples are."""
    module.sizes = sizes
    return module


# Sizes with and without divisors: torch's kernels see them in few lanes and in many.
NORMS = {
    "instance norm": lambda: of_size(nn.InstanceNorm2d(32, affine=True), 32, 48, 48),
    "instance norm, small": lambda: of_size(nn.InstanceNorm2d(6, affine=True), 6, 9, 7),
    "instance norm, plain": lambda: of_size(nn.InstanceNorm3d(20), 20, 10, 12, 11),
    "group norm": lambda: of_size(nn.GroupNorm(4, 32), 32, 32, 40),
    "group norm, one": lambda: of_size(nn.GroupNorm(1, 3), 3, 23, 24, 8),
}


EVERY = {
    **{name: (name.partition(",")[0].replace(" ", "_"), make) for name, make in NORMS.items()},
    **{name: ("pooling", make) for name, make in POOLS.items()},
    **{name: ("softmax", make) for name, make in SOFTMAXES.items()},
    **{name: ("conv3d", make) for name, make in CONVOLUTIONS.items()},
}


def pair(name):
    """Return torch's module, and a repaired copy."""
    repair, make = EVERY[name]
    module = make()
    repaired = copy.deepcopy(module)
    assert find_repair(repair).fits(repaired)
    find_repair(repair).repair(repaired, NAMES)
    assert find_repair(repair).is_repaired(repaired)
    assert isinstance(repaired, type(module))
    return module, repaired


def sample(module, batch=1, channels=4):
    if isinstance(module, nn.LPPool3d):  # roots of negative sums are nan
        return torch.rand(batch, channels, 9, 8, 7)
    if sizes := getattr(module, "sizes", None):  # at batch 1 with a large mean
        return torch.randn(batch, *sizes) + (1000 if batch == 1 else 0)
    channels = getattr(module, "in_channels", channels)
    two = isinstance(module, nn.Softmax2d | nn.AdaptiveAvgPool2d)
    return torch.randn(batch, channels, *((9, 8) if two else (9, 8, 7)))


def is_canonical(x):
    return x.stride() == canonical_stride(x.shape, NAMES[x.dim()])
