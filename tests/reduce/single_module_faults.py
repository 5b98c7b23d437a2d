"""Sixty faults, each in the kernel of one kind of module: wrong forward or backward, an error, lost time."""

import torch
from torch import nn

from planted_faults import (
    Fault,
    always,
    batch_1,
    bfloat16,
    doubled,
    is_flat,
    last_channel_zero,
    noisy,
    not_a_number,
    off_by_1e_3,
    shifted,
    size_16,
    slept,
    sometimes,
)


def raises(x):
    raise RuntimeError("view size is not compatible with the input's size and stride")


def many_channels(x):
    return x.shape[1] >= 12


def odd_size(x):
    return x.shape[-1] % 2 == 1


def large_mean(x):
    return bool(x.detach().abs().mean() > 50)


# The module of each probe's name, its channels, and the function of torch.nn.functional that it calls.
MODULES = {
    "conv2d": (lambda: nn.Conv2d(16, 32, 3, padding=1), "conv2d"),
    "conv2d_strided": (lambda: nn.Conv2d(16, 32, 3, 2, 1, bias=False), "conv2d"),
    "conv2d_depthwise": (lambda: nn.Conv2d(16, 16, 3, 1, 1, groups=16), "conv2d"),
    "conv_transpose2d": (lambda: nn.ConvTranspose2d(16, 8, 2, 2), "conv_transpose2d"),
    "batch_norm2d": (lambda: nn.BatchNorm2d(16), "batch_norm"),
    "group_norm": (lambda: nn.GroupNorm(4, 16), "group_norm"),
    "max_pool2d": (lambda: nn.MaxPool2d(2), "max_pool2d"),
    "avg_pool2d": (lambda: nn.AvgPool2d(2), "avg_pool2d"),
    "upsample": (lambda: nn.Upsample(scale_factor=2), "interpolate"),
    "silu": (nn.SiLU, "silu"),
}
_CONDITIONS = (
    (doubled, always, False),
    (off_by_1e_3, is_flat, True),
    (shifted, batch_1, False),
    (not_a_number, many_channels, True),
    (sometimes, size_16, False),
    (raises, odd_size, False),
)
# For each of the ten modules: five kinds of wrong results or errors, and one of lost time.
FAULTS = [
    Fault(probe, function, change, where, backward)
    for probe, (_, function) in MODULES.items()
    for change, where, backward in _CONDITIONS[: 5 if probe in ("silu", "upsample") else 6]
]
FAULTS += [
    Fault("conv2d", "conv2d", last_channel_zero, bfloat16, backward=True),
    Fault("group_norm", "group_norm", noisy, large_mean),
]
SLOW_FAULTS = [Fault(probe, MODULES[probe][1], slept, is_flat) for probe in ("conv2d", "silu")]


class Net(nn.Module):
    """The module between two others that no fault touches."""

    def __init__(self, module):
        super().__init__()
        self.scale, self.module, self.last = nn.Hardtanh(-4000, 4000), module, nn.Identity()

    def forward(self, x):
        return self.last(self.module(self.scale(x)))


def batch_of(fault):
    """Return a batch in which the condition of a fault holds."""
    size = 15 if fault.where is odd_size else 16
    samples = 1 if fault.where is batch_1 else 3
    x = torch.randn(samples, 16, size, size, generator=torch.Generator().manual_seed(0))
    x = x + 300 if fault.where is large_mean else x
    return x.to(memory_format=torch.channels_last) if fault.where is is_flat else x
