"""Which layout is wanted for each rank: as asked for, or as the model's own convolutions lie."""

from collections import Counter
from collections.abc import Mapping

from torch import nn

from prepare.core.model.memory_format import FORMATS, canonical_stride, satisfied, takes
from prepare.core.model.tensors import is_strided, named_tensors
from prepare.core.utils.suggest import choose
from prepare.errors import ConfigError
from prepare.flow.layouts import RANKS

_CONVOLUTIONS = (nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def wanted_layouts(model: nn.Module, asked: Mapping[int, str] | None = None) -> dict[int, str]:
    """`{rank: format}` for the ranks whose activations are followed.

    Without `asked` every convolution's weight votes by its exact strides. One that satisfies two
    formats (1x1 kernels, one channel per group) is asked only where no other weight has that rank:
    code that skips such a weight leaves it contiguous. Where none votes, contiguous it is. A rank
    without a convolution is not followed, unless there is none at all.

    Raises:
        ConfigError: `asked` names another rank, or a format that the rank cannot take.
    """
    if asked is not None:
        return _checked(asked)
    votes: dict[tuple[int, bool], Counter[str]] = {}
    for tensor in named_tensors(model):
        is_weight = tensor.name == "weight" or tensor.computes == "weight"
        if is_weight and isinstance(tensor.module, _CONVOLUTIONS) and is_strided(tensor.tensor):
            shape, stride = tuple(tensor.tensor.shape), tensor.tensor.stride()
            clear = len(satisfied(shape, stride)) < 2
            votes.setdefault((len(shape), clear), Counter()).update(_vote(shape, stride))
    ranks = [rank for rank in RANKS if any(seen == rank for seen, _ in votes)] or RANKS
    return {rank: _winner(votes.get((rank, True)) or votes.get((rank, False))) for rank in ranks}


def _vote(shape: tuple[int, ...], stride: tuple[int, ...]) -> list[str]:
    formats = [name for name in FORMATS if takes(name, len(shape))]
    exact = [name for name in formats if canonical_stride(shape, name) == stride]
    return exact if len(exact) == 1 else []  # a weight of one element has the strides of all


def _winner(votes: Counter[str] | None) -> str:
    # Channels-last wins a tie: a convolution only lies so where somebody wanted it.
    return max(reversed(FORMATS), key=lambda name: votes[name]) if votes else "contiguous"


def _checked(asked: Mapping[int, str]) -> dict[int, str]:
    for rank, name in asked.items():
        if rank not in RANKS:
            raise ConfigError("wanted", f"{rank!r} is no rank that is followed", "give 4 or 5")
        allowed = [word for word in FORMATS if takes(word, rank)]
        if name not in allowed:
            raise ConfigError(
                f"wanted.{rank}", f"{name!r} is no format", choose(str(name), allowed)
            )
    return dict(sorted(asked.items()))
