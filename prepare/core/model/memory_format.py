"""Facts about one tensor: which memory formats its strides satisfy, and the canonical strides of each."""

from collections.abc import Sequence
from functools import lru_cache

FORMATS = ("contiguous", "channels_last", "channels_last_3d")

# The order, from the slowest dimension to the fastest, in which each format lays a tensor out.
_ORDER = {"channels_last": (0, 2, 3, 1), "channels_last_3d": (0, 2, 3, 4, 1)}
_RANK = {"channels_last": 4, "channels_last_3d": 5}


def takes(memory_format: str, rank: int) -> bool:
    """Whether a tensor of `rank` dimensions can be laid out in `memory_format`."""
    return _RANK.get(memory_format, rank) == rank


def canonical_stride(shape: Sequence[int], memory_format: str) -> tuple[int, ...]:
    """The strides that `torch.empty(shape, memory_format=...)` gives, in elements, one per dimension.

    Raises:
        ValueError: `memory_format` does not exist for this number of dimensions.
    """
    if not takes(memory_format, len(shape)):
        raise ValueError(
            f"{memory_format} needs {_RANK[memory_format]} dimensions, got {len(shape)}"
        )
    contiguous = memory_format == "contiguous"
    order = range(len(shape)) if contiguous else _ORDER[memory_format]
    stride = [0] * len(shape)
    step = 1
    for dim in reversed(order):
        stride[dim] = step
        # torch steps over an empty dimension as over one of size 1, in the contiguous format only.
        step *= max(shape[dim], 1) if contiguous else shape[dim]
    return tuple(stride)


@lru_cache(maxsize=65536)  # networks repeat few shapes many times
def satisfied(shape: Sequence[int], stride: Sequence[int]) -> tuple[str, ...]:
    """Every format of `FORMATS` that these strides satisfy, in that order.

    This answers as `Tensor.is_contiguous(memory_format=...)` does: a dimension of size 1 never
    counts, so a 1x1 convolution's weight satisfies both its formats whether it was converted or
    not. Only `canonical_stride` tells those two apart.
    """
    return tuple(
        name for name in FORMATS if takes(name, len(shape)) and _satisfies(shape, stride, name)
    )


def span(shape: Sequence[int], stride: Sequence[int]) -> int:
    """How many elements of storage lie between the first and the last of a tensor, inclusive."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def _satisfies(shape: Sequence[int], stride: Sequence[int], memory_format: str) -> bool:
    if memory_format == "contiguous" and 0 in shape:
        return True
    wanted = canonical_stride(shape, memory_format)
    return all(
        size == 1 or have == want for size, have, want in zip(shape, stride, wanted, strict=True)
    )
