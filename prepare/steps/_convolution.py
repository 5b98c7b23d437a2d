"""What the two convolution steps share: which tensors are a convolution's weight, and what a miss means."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from prepare.patterns import Patterns
from prepare.step import TensorStep, Want

if TYPE_CHECKING:
    import torch

    from prepare.tensors import NamedTensor


@dataclass(frozen=True, kw_only=True)
class ConvolutionFormat(TensorStep):
    """Wants the weights of convolutions of one rank, subclasses and transposed ones too, in a format."""

    spatial: ClassVar[int]
    memory_format: str
    include: Patterns = ()
    exclude: Patterns = ()

    def want(self, tensor: NamedTensor) -> Want | None:
        if "weight" not in (tensor.name, tensor.computes):
            return None
        fits = isinstance(tensor.module, _classes(self.spatial))
        # Behind a computed weight stand vectors as well (weight_g, spectral_norm's u): those have
        # no such format.
        if fits and tensor.tensor.dim() == self.spatial + 2:
            return Want(memory_format=self.memory_format)
        return None

    def nothing_matched(self, model: torch.nn.Module) -> str:
        counts = Counter(
            spatial
            for module in model.modules()
            for spatial in (2, 3)
            if isinstance(module, _classes(spatial))
        )
        other = 5 - self.spatial
        known = f"{type(model).__name__} has no Conv{self.spatial}d"
        if counts[self.spatial]:
            return (
                f"every one of {counts[self.spatial]} Conv{self.spatial}d is kept off by a pattern"
            )
        if counts[other]:
            formats = {2: "channels_last", 3: "channels_last_3d"}
            meant = f"memfmt={formats[other]} (the step conv{other}d_memory_format)"
            return f"{known} and {counts[other]} Conv{other}d; did you mean {meant}?"
        return f"{known} and no Conv{other}d"


def _classes(spatial: int) -> tuple[type, type]:
    from torch import nn

    return (nn.Conv2d, nn.ConvTranspose2d) if spatial == 2 else (nn.Conv3d, nn.ConvTranspose3d)
