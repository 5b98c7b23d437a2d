"""What the two convolution steps share: which tensors are a convolution's weight, and what a miss means."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from prepare.patterns import Patterns
from prepare.step import TensorStep, Want

if TYPE_CHECKING:
    import torch

    from prepare.core.model.tensors import NamedTensor


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
        other = 5 - self.spatial
        counts = {
            spatial: sum(isinstance(module, _classes(spatial)) for module in model.modules())
            for spatial in (2, 3)
        }
        name = type(model).__name__
        if counts[self.spatial]:
            return f"{name} has {counts[self.spatial]} Conv{self.spatial}d, and patterns keep it off all"
        if counts[other]:
            formats = {2: "channels_last", 3: "channels_last_3d"}
            meant = f"memfmt={formats[other]} (the step conv{other}d_memory_format)"
            known = f"{name} has no Conv{self.spatial}d and {counts[other]} Conv{other}d"
            return f"{known}; did you mean {meant}?"
        return f"{name} has no Conv2d and no Conv3d{_outside(model)}"


def _outside(model: torch.nn.Module) -> str:
    """Parameters that may be weights of convolutions which no module of torch's own holds."""
    from torch.nn.parameter import is_lazy

    named = model.named_parameters()
    found = [name for name, held in named if not is_lazy(held) and held.dim() in (4, 5)]
    if not found:
        return ""
    count = f"{len(found)} 4-d or 5-d parameters" if len(found) > 1 else "one 4-d or 5-d parameter"
    names = ", ".join(found[:3]) + (", ..." if len(found) > 3 else "")
    return (
        f", but {count} ({names}): prepare a model before it is exported or quantized; "
        "a weight that forward hands to F.conv2d itself needs a step of your own"
    )


def _classes(spatial: int) -> tuple[type, type]:
    from torch import nn

    return (nn.Conv2d, nn.ConvTranspose2d) if spatial == 2 else (nn.Conv3d, nn.ConvTranspose3d)
