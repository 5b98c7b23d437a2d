"""Choose the wanted layout for each rank: the user's, or that of the model's convolution weights."""

from collections import Counter
from collections.abc import Mapping

from torch import nn

from prepare.core.model.memory_format import FORMATS, canonical_stride, satisfied, takes
from prepare.core.model.module_kinds import CONVOLUTIONS_2D_3D
from prepare.core.model.tensors import is_strided, named_tensors
from prepare.core.utils.suggest import choose
from prepare.errors import ConfigError
from prepare.flow.layouts import RANKS


def choose_target_layouts(
    model: nn.Module, wanted: Mapping[int, str] | None = None
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
        if (
            is_weight
            and isinstance(tensor.module, CONVOLUTIONS_2D_3D)
            and is_strided(tensor.tensor)
        ):
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


def _checked(wanted: Mapping[int, str]) -> dict[int, str]:
    for rank, name in wanted.items():
        if rank not in RANKS:
            raise ConfigError(
                "wanted", f"{rank!r} is not a rank that can be followed", "use 4 or 5"
            )
        allowed = [word for word in FORMATS if takes(word, rank)]
        if name not in allowed:
            raise ConfigError(
                f"wanted.{rank}", f"{name!r} is not a format", choose(str(name), allowed)
            )
    return dict(sorted(wanted.items()))
