"""Copy tensors in parts that fit in a cache, each cast and permuted by torch's fastest kernels."""

from cmath import isfinite
from functools import cache
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from prepare.core.model.memory_format import canonical_stride, span

# Elements of a part.
_PART = 2**18
# With fewer elements, one kernel is faster than two.
_SMALL = 2**15
_CHANNELS_LAST = {4: "channels_last", 5: "channels_last_3d"}


class CopyPart(NamedTuple):
    """A part of the new data of a tensor, and the same part of the tensor."""

    target: Tensor
    source: Tensor

    @property
    def is_on_cpu(self) -> bool:
        """Return whether both are in the memory of the CPU."""
        return self.target.device.type == self.source.device.type == "cpu"


def split(target: Tensor, source: Tensor) -> list[CopyPart]:
    """Return the copies that fill `target` with `source`: one of all, unless both are on the CPU."""
    whole = CopyPart(target, source)
    if not whole.is_on_cpu or source.numel() <= _PART:
        return [whole]
    if target.stride() == source.stride() and span(source.shape, source.stride()) == source.numel():
        target, source = (t.as_strided((t.numel(),), (1,)) for t in whole)
    rows = max(1, _PART * len(source) // source.numel())
    return [CopyPart(*pair) for pair in zip(target.split(rows), source.split(rows), strict=True)]


def copy(part: CopyPart) -> bool:
    """Copy `source` into `target`; return whether no cast can have made a value infinite."""
    target, source = part
    if part.is_on_cpu and source.numel() >= _SMALL:
        source = _permuted(source, target.stride())
        if source.stride() != target.stride() and source.dtype != target.dtype:
            # torch's kernel that casts and permutes at once goes element by element.
            source = source.to(target.dtype)
    target.copy_(source, non_blocking=True)
    if not is_narrower(target.dtype, part.source.dtype):
        return True
    # The sum of values that are not all finite is not finite.
    return part.is_on_cpu and target.dtype.itemsize > 1 and isfinite(target.sum().item())


@cache
def is_narrower(new: torch.dtype, old: torch.dtype) -> bool:
    """Return whether a cast from `old` to `new` can make a finite number infinite."""
    if not all(dtype.is_floating_point or dtype.is_complex for dtype in (new, old)):
        return False
    return torch.finfo(new).max < torch.finfo(old).max


def _permuted(source: Tensor, stride: tuple[int, ...]) -> Tensor:
    """Return a contiguous float32 tensor with these channels-last strides; any other tensor as it is.

    For each output channel this is the transposition of (channels, kernel), which is how torch shuffles
    channels. That kernel uses vector instructions, and torch's copy does not.
    """
    shape = source.shape
    if (
        source.dtype is not torch.float32
        or len(shape) not in _CHANNELS_LAST
        or not source.is_contiguous()
        or stride != canonical_stride(shape, _CHANNELS_LAST[len(shape)])
        or min(shape[1], prod(shape[2:])) == 1
    ):
        return source
    length = prod(shape[1:])
    pixels = source.as_strided((len(source), length, 1, 1), (length, 1, length, length))
    return torch.channel_shuffle(pixels, shape[1]).as_strided(shape, stride)
