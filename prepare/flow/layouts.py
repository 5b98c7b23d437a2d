"""Name the layout of a tensor: the order of its dimensions in memory, regardless of gaps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from prepare.core.model.memory_format import FORMATS, satisfied, takes

if TYPE_CHECKING:
    from torch import Tensor

RANKS = (4, 5)
# The dimensions from the slowest to the fastest.
_ORDERS = {"channels_last": (0, 2, 3, 1), "channels_last_3d": (0, 2, 3, 4, 1)}


def layout_of(tensor: Tensor) -> str:
    """Return one of FORMATS, `ambiguous` if several fit, `other` if none fits, `none` for other ranks.

    A slice of a channels-last tensor has gaps, but kernels treat it as channels-last, and so does this.
    """
    return _layout(tuple(tensor.shape), tensor.stride())


@lru_cache(maxsize=65536)  # networks repeat few shapes many times
def _layout(shape: Sequence[int], stride: Sequence[int]) -> str:
    if len(shape) not in RANKS:
        return "none"
    fitting = [
        name
        for name in FORMATS
        if takes(name, len(shape))
        and _is_in_order(shape, stride, _ORDERS.get(name, range(len(shape))))
    ]
    if len(fitting) > 1 or 0 in shape:
        return "ambiguous"
    return fitting[0] if fitting else "other"


def has_odd_strides(tensor: Tensor) -> bool:
    """Return True if strides that can be read as channels-last are contiguous to torch's kernels.

    `t[0].unsqueeze(0)` gives a batch of one a stride of C, where the canonical stride is C*H*W:
    `is_contiguous` returns True for channels-last, and c10's `is_channels_last_strides_2d`, which is
    repeated here, returns False. pytorch#68430.
    """
    order = _ORDERS.get(layout_of(tensor))
    if order is None:
        return False
    shape, stride = tuple(tensor.shape), tensor.stride()
    least = 0
    for dim in reversed(order):
        if stride[dim] < least or (dim == 0 and least == stride[1]):
            return True
        least = stride[dim] * max(shape[dim], 1)
    return stride[1] == 0


def is_in_layout(tensor: Tensor, wanted: Mapping[int, str]) -> bool:
    """Return True if a tensor has the layout that is wanted for its rank, and no other."""
    return layout_of(tensor) == wanted.get(tensor.dim())


def is_in_other_layout(tensor: Tensor, wanted: Mapping[int, str]) -> bool:
    """Return True if a layout is wanted for the tensor's rank, and its strides do not fit that layout."""
    rank = tensor.dim()
    return rank in wanted and layout_of(tensor) not in (wanted[rank], "ambiguous")


def describe_layout(tensor: Tensor) -> str:
    """Describe the layout of a tensor of any rank: `channels_last`, `contiguous with gaps`, `permuted`."""
    word = layout_of(tensor)
    dense = satisfied(tuple(tensor.shape), tensor.stride())
    if word in ("none", "other"):
        return "contiguous" if dense else "permuted"
    return word if word == "ambiguous" or word in dense else f"{word} with gaps"


def dimension_order(tensor: Tensor) -> tuple[int, ...]:
    """Return the dimensions from the slowest to the fastest, without those of size 1 or expanded."""
    stride = tensor.stride()
    dims = [dim for dim, size in enumerate(tensor.shape) if size > 1 and stride[dim] > 0]
    return tuple(sorted(dims, key=lambda dim: -stride[dim]))


def _is_in_order(shape: Sequence[int], stride: Sequence[int], order: Sequence[int]) -> bool:
    least = 0
    for dim in reversed(order):
        # The stride of an expanded dimension (0) or of one of size 1 does not constrain the order.
        if shape[dim] > 1 and stride[dim] > 0:
            if stride[dim] < least:
                return False
            least = stride[dim] * shape[dim]
    return True
