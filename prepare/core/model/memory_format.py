"""Compute the memory formats that strides satisfy, and the canonical strides of each format."""

from collections.abc import Sequence
from functools import lru_cache

FORMATS = ("contiguous", "channels_last", "channels_last_3d")

# The dimensions of each format, from the one with the largest stride to that with the smallest.
ORDERS = {"channels_last": (0, 2, 3, 1), "channels_last_3d": (0, 2, 3, 4, 1)}
# The channels-last format of each number of dimensions.
CHANNELS_LAST = {4: "channels_last", 5: "channels_last_3d"}
_RANK = {name: rank for rank, name in CHANNELS_LAST.items()}


def takes(memory_format: str, rank: int) -> bool:
    """Return whether a tensor of `rank` dimensions can have `memory_format`."""
    return _RANK.get(memory_format, rank) == rank


def canonical_stride(shape: Sequence[int], memory_format: str) -> tuple[int, ...]:
    """Return the strides of `torch.empty(shape, memory_format=...)`, in elements, one per dimension.

    Raises:
        ValueError: `memory_format` does not exist for this number of dimensions.
    """
    if not takes(memory_format, len(shape)):
        raise ValueError(
            f"{memory_format} needs {_RANK[memory_format]} dimensions, got {len(shape)}"
        )
    contiguous = memory_format == "contiguous"
    order = range(len(shape)) if contiguous else ORDERS[memory_format]
    stride = [0] * len(shape)
    step = 1
    for dim in reversed(order):
        stride[dim] = step
        # In the contiguous format only, torch treats a dimension of size 0 as one of size 1.
        step *= max(shape[dim], 1) if contiguous else shape[dim]
    return tuple(stride)


@lru_cache(maxsize=65536)  # networks repeat few shapes many times
def satisfied(shape: Sequence[int], stride: Sequence[int]) -> tuple[str, ...]:
    """Return every format of `FORMATS` that these strides satisfy, in that order.

    The result agrees with `Tensor.is_contiguous(memory_format=...)`: a dimension of size 1 never
    counts, so the weight of a 1x1 convolution satisfies both its formats, converted or not. Only
    `canonical_stride` distinguishes the two.
    """
    return tuple(
        name for name in FORMATS if takes(name, len(shape)) and _satisfies(shape, stride, name)
    )


def span(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Return the number of storage elements from the first to the last element of a tensor, inclusive."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def _satisfies(shape: Sequence[int], stride: Sequence[int], memory_format: str) -> bool:
    if memory_format == "contiguous" and 0 in shape:
        return True
    canonical = canonical_stride(shape, memory_format)
    return all(
        size == 1 or step == target
        for size, step, target in zip(shape, stride, canonical, strict=True)
    )
