"""Convolutions that a rewrite fits, with inputs of random sizes, and rewritten copies of them."""

import copy
import random

import torch
from torch import nn
from torch.nn import functional as F

from prepare.steps.repairs import find_rewrite
from prepare.steps.repairs.base import FORMATS


class Causal(nn.Conv3d):
    """A convolution that pads earlier frames itself, as the decoders of video models do."""

    def forward(self, x):
        h, w = (size // 2 for size in self.kernel_size[1:])
        return super().forward(F.pad(x, (w, w, h, h, self.kernel_size[0] - 1, 0)))


class Trailing(nn.Conv3d):
    """A convolution that pads later frames itself, as chunked decoders do."""

    def forward(self, x):
        return super().forward(F.pad(x, (0, 0, 0, 0, 0, self.kernel_size[0] - 1)))


CONVS = {2: nn.Conv2d, 3: nn.Conv3d}


def _sized(numbers, rank, low, high):
    return tuple(numbers.randint(low, high) for _ in range(rank))


def _patches(numbers, *, positions):
    rank = numbers.randint(2, 3)
    kernel = (*_sized(numbers, rank - 1, 1, 4), numbers.choice((2, 2, 3, 5, 7)))
    channels, outputs = numbers.choice((1, 1, 2, 3, 5, 8)), numbers.choice((1, 2, 5, 8))
    module = CONVS[rank](
        channels,
        outputs,
        kernel,
        kernel,
        numbers.choice((0, 0, "valid")),
        tuple(numbers.randint(1, 3) if size == 1 else 1 for size in kernel),
        bias=numbers.random() < 0.6,
        padding_mode=numbers.choice(("zeros", "zeros", "circular")),
    )
    sizes = [size * numbers.randint(1, positions) for size in kernel]
    return module, (numbers.randint(1, 4), channels, *sizes)


def _pixels(numbers):
    rank, channels = numbers.randint(2, 3), numbers.choice((1, 1, 2, 3, 6, 16))
    module = CONVS[rank](
        channels,
        numbers.choice((1, 1, 2, 5, 16)),
        1,
        padding=numbers.choice((0, "valid", "same")),
        dilation=numbers.randint(1, 3),
        bias=numbers.random() < 0.6,
        padding_mode=numbers.choice(("zeros", "reflect")),
    )
    return module, (numbers.randint(1, 4), channels, *_sized(numbers, rank, 1, 5))


def _flat(numbers):
    groups = numbers.choice((1, 1, 2, 3))
    channels, outputs = (groups * numbers.randint(1, 3) for _ in range(2))
    is_space = numbers.random() < 0.5
    along = (0, 1, 1) if is_space else (1, 0, 0)
    kernel = (1, numbers.randint(1, 4), numbers.randint(2, 4))
    kernel = kernel if is_space else (numbers.randint(2, 4), 1, 1)
    padding = numbers.choice(("valid", "same", None, None, None))
    steps = tuple(numbers.randint(1, 3) if each else 1 for each in along)
    if channels == groups:
        steps = (*steps[:2], min(steps[1:]))
    dilation = tuple(numbers.randint(1, 2) if each and groups == 1 else 1 for each in along)
    spans = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    module = nn.Conv3d(
        channels,
        outputs,
        kernel,
        1 if padding == "same" else steps,
        padding or tuple(numbers.randint(0, min(2, span - 1)) for span in spans),
        dilation,
        groups,
        bias=numbers.random() < 0.6,
    )
    sizes = [span + numbers.randint(0, 3) for span in spans]
    return module, (numbers.randint(1, 3), channels, *sizes)


def _frame(numbers):
    groups, grown, step = numbers.choice((1, 1, 2)), numbers.randint(1, 2), numbers.randint(1, 2)
    channels, outputs = (groups * numbers.randint(1, 3) for _ in range(2))
    time, h, w = numbers.randint(2, 4), *(numbers.choice((1, 2, 3)) for _ in range(2))
    step, grown = 1 if h == w == 1 else step, grown if groups == 1 else 1
    pad = min(1, h - 1)
    kind, strides, padding = numbers.choice(
        (
            (Causal, (numbers.randint(1, 2), step, step), 0),
            (Trailing, (1, step, 1), (0, numbers.randint(0, pad), 0)),
            (nn.Conv3d, (numbers.randint(1, 3), step, 1), (1, pad, 0)),
        )
    )
    time = 3 if kind is nn.Conv3d else time
    module = kind(
        channels,
        outputs,
        (time, h, w),
        strides,
        padding,
        (1, grown, 1),
        groups,
        bias=numbers.random() < 0.6,
    )
    sizes = (1, grown * (h - 1) + 1 + numbers.randint(0, 4), w + numbers.randint(0, 4))
    return module, (numbers.randint(1, 3), channels, *sizes)


MAKE = {
    "linear": lambda n: _patches(n, positions=3),
    "one_position": lambda n: _patches(n, positions=1),
    "pointwise": _pixels,
    "lower_rank": _flat,
    "one_frame": _frame,
}
LAYOUTS = ("contiguous", "channels_last", "weight", "input")
STRANGE = ("sliced", "transposed", "expanded", "chunk")


def make(name, seed, layout="contiguous", *, exact=False):
    """Return torch's convolution and an input that the rewrite serves, in a layout; integers if `exact`."""
    torch.manual_seed(seed)
    module, sizes = MAKE[name](random.Random(seed))
    x, last = torch.randn(sizes), FORMATS[len(sizes)]
    if exact:
        module, x = module.double(), torch.randint(-9, 10, sizes).double()
        for each in module.parameters():
            each.data = torch.randint(-9, 10, each.shape).double()
    if layout in ("channels_last", "weight"):
        module = module.to(memory_format=last)
    if layout in ("channels_last", "input"):
        x = x.contiguous(memory_format=last)
    return module, strange(x, layout) if layout in STRANGE else x


def strange(x, layout):
    """Return `x` as a view with strides of neither format; `expanded` has other values."""
    if layout == "sliced":
        return torch.stack([x, x], -1)[..., 0]
    if layout == "transposed":
        return x.transpose(-1, -2).contiguous().transpose(-1, -2)
    if layout == "expanded":
        return x[:1].expand_as(x)
    return torch.cat([x, x], 1).chunk(2, 1)[0]


def rewritten(name, module, formats=None):
    """Return a rewritten copy."""
    found, copied = find_rewrite(name), copy.deepcopy(module)
    assert found.fits(copied), found.reason(copied)
    found.repair(copied, formats or {})
    return copied


class Served:
    """Counts the calls that rewrites serve."""

    def __init__(self, monkeypatch):
        from prepare.steps.repairs.rewrites import Rewritten

        self.count, torchs = 0, Rewritten.served

        def served(module, x, weight, bias):
            result = torchs(module, x, weight, bias)
            self.count += result is not None
            return result

        monkeypatch.setattr(Rewritten, "served", served)
