"""Which layout is wanted for each rank: as asked for, or as the model's own convolutions lie."""

from collections import Counter
from collections.abc import Mapping

from torch import nn

from prepare.errors import ConfigError, choose
from prepare.flows.layouts import RANKS
from prepare.layout import FORMATS, canonical_stride, satisfied, takes
from prepare.tensors import is_strided, named_tensors

_CONVOLUTIONS = (nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def wanted_layouts(model: nn.Module, asked: Mapping[int, str] | None = None) -> dict[int, str]:
    """`{rank: format}` for the ranks whose activations are followed.

    Without `asked` every convolution's weight votes by its exact strides; one that satisfies two
    formats (1x1 kernels, one channel) does not, and where none votes, contiguous it is. A rank
    without a convolution is not followed, unless there is none at all.

    Raises:
        ConfigError: `asked` names another rank, or a format that the rank cannot take.
    """
    if asked is not None:
        return _checked(asked)
    votes = {rank: Counter[str]() for rank in RANKS}
    seen = set()
    for tensor in named_tensors(model):
        is_weight = tensor.name == "weight" or tensor.computes == "weight"
        if is_weight and isinstance(tensor.module, _CONVOLUTIONS) and is_strided(tensor.tensor):
            shape, stride = tuple(tensor.tensor.shape), tensor.tensor.stride()
            if len(shape) in RANKS:
                seen.add(len(shape))
                votes[len(shape)].update(_vote(shape, stride))
    ranks = sorted(seen) or RANKS
    return {rank: _winner(votes[rank]) for rank in ranks}


def _vote(shape: tuple[int, ...], stride: tuple[int, ...]) -> list[str]:
    if len(satisfied(shape, stride)) > 1:
        return []
    return [
        name
        for name in FORMATS
        if takes(name, len(shape)) and canonical_stride(shape, name) == stride
    ]


def _winner(votes: Counter[str]) -> str:
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
