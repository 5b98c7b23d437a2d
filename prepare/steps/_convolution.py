"""The part that the two convolution steps share: find convolution weights, and explain a miss."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

from prepare.core.utils.wording import step, words
from prepare.patterns import Patterns
from prepare.step import Offer, TensorStep, Want

if TYPE_CHECKING:
    import torch

    from prepare.core.model.tensors import NamedTensor


@dataclass(frozen=True, kw_only=True)
class ConvolutionFormat(TensorStep):
    """Request a memory format for the weights of all convolutions of one rank, also transposed ones."""

    recipe_part = "layout"
    complexity = 1
    spatial: ClassVar[int]
    memory_format: str
    include: Patterns = ()
    exclude: Patterns = ()

    @classmethod
    def offers(cls, model: torch.nn.Module, *, allow: Iterable[str], mode: str) -> Iterator[Offer]:
        if any(isinstance(module, _classes(cls.spatial)) for module in model.modules()):
            yield Offer({2: "channels_last", 3: "channels_last_3d"}[cls.spatial], {})
            yield Offer("contiguous", {"memory_format": "contiguous"})

    def want(self, tensor: NamedTensor) -> Want | None:
        if "weight" not in (tensor.name, tensor.computes):
            return None
        fits = isinstance(tensor.module, _classes(self.spatial))
        # A computed weight also depends on vectors (weight_g, spectral_norm's u), which have no such
        # format.
        if fits and tensor.tensor.dim() == self.spatial + 2:
            return self._want
        return None

    @cached_property
    def _want(self) -> Want:
        return Want(memory_format=self.memory_format)

    def nothing_matched(self, model: torch.nn.Module) -> str:
        other = 5 - self.spatial
        counts = {
            spatial: sum(isinstance(module, _classes(spatial)) for module in model.modules())
            for spatial in (2, 3)
        }
        name = type(model).__name__
        if counts[self.spatial]:
            count = f"{counts[self.spatial]} Conv{self.spatial}d"
            return f"{name} has {count}, and the patterns exclude all of them"
        if counts[other]:
            formats = {2: "channels_last", 3: "channels_last_3d"}
            suggestion = words(
                cli=f"memfmt={formats[other]} (the step conv{other}d_memory_format)",
                python=f"the step {step(f'conv{other}d_memory_format')}",
            )
            contents = f"{name} has no Conv{self.spatial}d and {counts[other]} Conv{other}d"
            return f"{contents}; did you mean {suggestion}?"
        return f"{name} has no Conv2d and no Conv3d{_other_parameters(model)}"


def _other_parameters(model: torch.nn.Module) -> str:
    """Name parameters that may be convolution weights held by other modules; empty if none."""
    from torch.nn.parameter import is_lazy

    named = model.named_parameters()
    paths = [path for path, held in named if not is_lazy(held) and held.dim() in (4, 5)]
    if not paths:
        return ""
    count = f"{len(paths)} 4-d or 5-d parameters" if len(paths) > 1 else "one 4-d or 5-d parameter"
    names = ", ".join(paths[:3]) + (", ..." if len(paths) > 3 else "")
    return (
        f", but {count} ({names}): prepare a model before it is exported or quantized; "
        "a weight that forward passes to F.conv2d itself needs a step of your own"
    )


def _classes(spatial: int) -> tuple[type, type]:
    from torch import nn

    return (nn.Conv2d, nn.ConvTranspose2d) if spatial == 2 else (nn.Conv3d, nn.ConvTranspose3d)
