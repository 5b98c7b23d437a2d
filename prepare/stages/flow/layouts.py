"""Name the layout of a tensor, regardless of gaps; choose the wanted layout for each rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from prepare.core.model.memory_format import FORMATS, ORDERS, canonical_stride, satisfied, takes
from prepare.core.model.module_kinds import CONVOLUTIONS_2D_3D
from prepare.core.model.tensors import is_strided, named_tensors
from prepare.core.utils.suggest import choose, meant
from prepare.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor, nn

RANKS = (4, 5)


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
        and _is_in_order(shape, stride, ORDERS.get(name, range(len(shape))))
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
    order = ORDERS.get(layout_of(tensor))
    if order is None:
        return False
    shape, stride = tuple(tensor.shape), tensor.stride()
    least = 0
    for dim in reversed(order):
        if stride[dim] < least or (dim == 0 and least == stride[1]):
            return True
        least = stride[dim] * max(shape[dim], 1)
    return stride[1] == 0


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


def choose_target_layouts(
    model: nn.Module, wanted: Mapping[int, str] | str | None = None
) -> dict[int, str]:
    """Return `{rank: format}` for the ranks whose activations are followed.

    Without `wanted`, every convolution weight votes by its exact strides. A weight that satisfies two
    formats (1x1 kernels, one channel per group) votes only if no other weight has that rank, since
    converters that skip such a weight leave it contiguous. Without votes the format is contiguous. A
    rank without convolutions is followed only if the model has no convolution at all.

    Raises:
        ConfigError: `wanted` names another rank, or a format that the rank does not support.
    """
    if wanted is not None:
        return _checked(wanted)
    votes: dict[tuple[int, bool], Counter[str]] = {}
    for tensor in named_tensors(model):
        is_weight = tensor.name == "weight" or tensor.computes == "weight"
        is_weight = is_weight and isinstance(tensor.module, CONVOLUTIONS_2D_3D)
        if is_weight and is_strided(tensor.tensor):
            shape, stride = tuple(tensor.tensor.shape), tensor.tensor.stride()
            is_clear = len(satisfied(shape, stride)) < 2
            votes.setdefault((len(shape), is_clear), Counter()).update(_vote(shape, stride))
    ranks = [rank for rank in RANKS if any(voted == rank for voted, _ in votes)] or RANKS
    return {rank: _winner(votes.get((rank, True)) or votes.get((rank, False))) for rank in ranks}


def _vote(shape: tuple[int, ...], stride: tuple[int, ...]) -> list[str]:
    formats = [name for name in FORMATS if takes(name, len(shape))]
    exact = [name for name in formats if canonical_stride(shape, name) == stride]
    return exact if len(exact) == 1 else []  # a weight of one element satisfies all formats


def _winner(votes: Counter[str] | None) -> str:
    # Channels-last wins a tie: a weight is channels-last only if it was converted.
    return max(reversed(FORMATS), key=lambda name: votes[name]) if votes else "contiguous"


def _checked(wanted: Mapping[int, str] | str) -> dict[int, str]:
    if isinstance(wanted, str):
        if (known := meant(wanted, FORMATS)) is None:
            raise ConfigError("wanted", f"{wanted!r} is not a format", choose(wanted, FORMATS))
        return {rank: known for rank in RANKS if takes(known, rank)}
    read: dict[int, str] = {}
    for rank, name in sorted(wanted.items()):
        if rank not in RANKS:
            wrong = f"{rank!r} is not a rank that can be followed"
            raise ConfigError("wanted", wrong, "use 4 or 5")
        allowed = [word for word in FORMATS if takes(word, rank)]
        if (known := meant(name, allowed)) is None:
            remedy = choose(str(name), allowed)
            raise ConfigError(f"wanted.{rank}", f"{name!r} is not a format", remedy)
        read[rank] = known
    return read
