"""Convolutions that a rewrite fits, with inputs of random sizes, and rewritten copies of them."""

import copy
import random

import torch
from torch import nn
from torch.nn import functional as F

from prepare.steps.repairs.base import FORMATS
from prepare.steps.rewrites import find_rewrite


class Causal(nn.Conv3d):
    """A convolution that pads earlier frames itself, as the decoders of video models do."""

    def forward(self, x):
        return super().forward(F.pad(x, (1, 1, 1, 1, self.kernel_size[0] - 1, 0)))


def _sized(numbers, rank, low, high):
    return tuple(numbers.randint(low, high) for _ in range(rank))


def _patches(numbers, rank, *, positions):
    kernel = (*_sized(numbers, rank - 1, 1, 3), numbers.randint(2, 4))
    channels, outputs = numbers.randint(1, 6), numbers.randint(1, 5)
    conv = (nn.Conv2d, nn.Conv3d)[rank - 2]
    module = conv(channels, outputs, kernel, kernel, bias=numbers.random() < 0.7)
    sizes = [size * numbers.randint(1, positions) for size in kernel]
    return module, (numbers.randint(1, 3), channels, *sizes)


def _pixels(numbers):
    rank, channels = numbers.randint(2, 3), numbers.randint(1, 6)
    conv = (nn.Conv2d, nn.Conv3d)[rank - 2]
    module = conv(channels, numbers.randint(1, 5), 1, bias=numbers.random() < 0.7)
    return module, (numbers.randint(1, 3), channels, *_sized(numbers, rank, 1, 5))


def _flat(numbers):
    h, w, t = _sized(numbers, 3, 2, 3)
    groups, step, grown = numbers.choice((1, 2)), numbers.randint(1, 2), numbers.randint(1, 2)
    kernel, along = numbers.choice((((1, h, w), (0, 1, 1)), ((t, 1, 1), (1, 0, 0))))
    strided = tuple(step if each else 1 for each in along)
    dilation = tuple(grown if each else 1 for each in along)
    module = nn.Conv3d(2 * groups, 4, kernel, strided, along, dilation, groups)
    return module, (numbers.randint(1, 3), 2 * groups, *_sized(numbers, 3, 4, 6))


def _frame(numbers):
    if numbers.random() < 0.5:
        module = Causal(4, 6, (numbers.randint(2, 3), 3, 3), groups=numbers.choice((1, 2)))
    else:
        module = nn.Conv3d(4, 6, 3, (1, 2, 1), padding=1, bias=False)
    return module, (numbers.randint(1, 3), 4, 1, *_sized(numbers, 2, 3, 6))


MAKE = {
    "linear": lambda n: _patches(n, n.randint(2, 3), positions=3),
    "one_position": lambda n: _patches(n, n.randint(2, 3), positions=1),
    "pointwise": _pixels,
    "lower_rank": _flat,
    "one_frame": _frame,
}
LAYOUTS = ("contiguous", "channels_last", "weight", "input")


def make(name, seed, layout="contiguous"):
    """Return torch's convolution and an input that the rewrite serves, in a layout."""
    torch.manual_seed(seed)
    module, sizes = MAKE[name](random.Random(seed))
    x, last = torch.randn(sizes), FORMATS[len(sizes)]
    if layout in ("channels_last", "weight"):
        module = module.to(memory_format=last)
    if layout in ("channels_last", "input"):
        x = x.contiguous(memory_format=last)
    return module, x


def rewritten(name, module):
    """Return a rewritten copy."""
    found, copied = find_rewrite(name), copy.deepcopy(module)
    assert found.fits(copied), found.reason(copied)
    found.repair(copied, {})
    return copied


class Served:
    """Counts the calls that rewrites serve."""

    def __init__(self, monkeypatch):
        from prepare.steps.rewrites.base import Rewritten

        self.count, torchs = 0, Rewritten.served

        def served(module, x, weight, bias):
            result = torchs(module, x, weight, bias)
            self.count += result is not None
            return result

        monkeypatch.setattr(Rewritten, "served", served)
