"""Find the ranks whose convolutions are, or will be, in channels-last."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, ClassVar, Self

from prepare.step import ModuleStep, Step
from prepare.steps._convolution import ConvolutionFormat

if TYPE_CHECKING:
    import torch

_CHANNELS_LAST = {4: "channels_last", 5: "channels_last_3d"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForChannelsLast(ModuleStep):
    """A step that acts only for the ranks that are in channels-last."""

    # The formats of the pipeline's other steps, set by `bind`; not an option.
    _formats_by_rank: ClassVar[Mapping[int, str]] = {}

    def bind(self, steps: Iterable[Step]) -> Self:
        bound = dataclasses.replace(self)
        for step in steps:
            if isinstance(step, ConvolutionFormat):
                formats = {**bound._formats_by_rank, step.spatial + 2: step.memory_format}
                object.__setattr__(bound, "_formats_by_rank", formats)
        return bound

    def formats(self, model: torch.nn.Module, *, force: bool = False) -> dict[int, str]:
        """Return the ranks that are, or will be, in channels-last, and the format; with `force`, both."""
        return {
            rank: last
            for rank, last in _CHANNELS_LAST.items()
            if force or self._formats_by_rank.get(rank) == last
            or (rank not in self._formats_by_rank and _has_weights_in(model, rank, last))
        }  # fmt: skip


def _has_weights_in(model: torch.nn.Module, rank: int, memory_format: str) -> bool:
    """Return whether a weight has exactly the strides of this format, and not those of contiguous too."""
    from torch import nn

    from prepare.core.model.memory_format import canonical_stride
    from prepare.core.model.tensors import is_lazy, is_strided

    classes = {4: (nn.Conv2d, nn.ConvTranspose2d), 5: (nn.Conv3d, nn.ConvTranspose3d)}[rank]
    for module in model.modules():
        # Read Parameters only: reading a computed weight may change its source tensors.
        weight = module._parameters.get("weight") if isinstance(module, classes) else None
        if weight is None or is_lazy(weight) or not is_strided(weight) or weight.dim() != rank:
            continue
        stride = canonical_stride(weight.shape, memory_format)
        if weight.stride() == stride != canonical_stride(weight.shape, "contiguous"):
            return True
    return False
