"""In which order of dimensions a tensor lies, gaps between its elements aside, in one word."""

from collections.abc import Mapping, Sequence
from functools import lru_cache

from prepare.core.model.memory_format import FORMATS, satisfied, takes

RANKS = (4, 5)
# The dimensions from the slowest to the fastest.
_ORDERS = {"channels_last": (0, 2, 3, 1), "channels_last_3d": (0, 2, 3, 4, 1)}


@lru_cache(maxsize=65536)  # networks repeat few shapes many times
def layout_of(shape: Sequence[int], stride: Sequence[int]) -> str:
    """One of FORMATS, `ambiguous` where several fit, `other` where none does, `none` for other ranks.

    A slice of a channels-last tensor has gaps, and kernels go on as for channels-last: so has this.
    """
    if len(shape) not in RANKS:
        return "none"
    found = [
        name
        for name in FORMATS
        if takes(name, len(shape)) and _follows(shape, stride, _ORDERS.get(name, range(len(shape))))
    ]
    return "ambiguous" if len(found) > 1 or 0 in shape else found[0] if found else "other"


def is_odd(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether this can be read as channels-last, and torch's kernels take it for contiguous.

    `t[0].unsqueeze(0)` gives a batch of one a stride of C, where C*H*W is canonical: `is_contiguous`
    says channels-last, and c10's `is_channels_last_strides_2d`, which this repeats, does not.
    pytorch#68430.
    """
    if layout_of(shape, stride) not in ("channels_last", "channels_last_3d"):
        return False
    least = 0
    for dim in reversed(_ORDERS[layout_of(shape, stride)]):
        if stride[dim] < least or (dim == 0 and least == stride[1]):
            return True
        least = stride[dim] * max(shape[dim], 1)
    return stride[1] == 0


def is_inside(shape: Sequence[int], stride: Sequence[int], wanted: Mapping[int, str]) -> bool:
    """Whether a tensor lies in the layout that is wanted for its rank, and in no other."""
    return layout_of(shape, stride) == wanted.get(len(shape))


def is_outside(shape: Sequence[int], stride: Sequence[int], wanted: Mapping[int, str]) -> bool:
    """Whether a layout is wanted for this rank, and the tensor cannot be read as having it."""
    if len(shape) not in wanted:
        return False
    return layout_of(shape, stride) not in (wanted[len(shape)], "ambiguous")


def in_words(shape: Sequence[int], stride: Sequence[int]) -> str:
    """How a tensor of any rank lies: `channels_last`, `contiguous with gaps`, `permuted`."""
    word = layout_of(shape, stride)
    dense = satisfied(shape, stride)
    if word in ("none", "other"):
        return "contiguous" if dense else "permuted"
    return word if word == "ambiguous" or word in dense else f"{word} with gaps"


def order_of(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """The dimensions from the slowest to the fastest; those of one element, or expanded, left out."""
    dims = [dim for dim, size in enumerate(shape) if size > 1 and stride[dim] > 0]
    return tuple(sorted(dims, key=lambda dim: -stride[dim]))


def _follows(shape: Sequence[int], stride: Sequence[int], order: Sequence[int]) -> bool:
    least = 0
    for dim in reversed(order):
        # An expanded dimension (stride 0) says as little about an order as one of size 1.
        if shape[dim] > 1 and stride[dim] > 0:
            if stride[dim] < least:
                return False
            least = stride[dim] * shape[dim]
    return True
