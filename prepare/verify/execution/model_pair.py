"""The two models of a verification, and stand-ins for the reference's tensors in other dtypes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from prepare.verify.execution import single_run

if TYPE_CHECKING:
    from prepare.pipeline import Pipeline
    from prepare.verify.static_checks import Pairs


@dataclass(frozen=True)
class Models:
    """Both models, and how the stand-ins of the reference are made like the prepared one's tensors."""

    reference: nn.Module
    prepared: nn.Module
    pipeline: Pipeline | None
    free: tuple[str, ...]
    kinds: Mapping[int, tuple[torch.dtype, torch.device]]
    dtype: torch.dtype
    depth: int

    @classmethod
    def of(
        cls, reference: nn.Module, prepared: nn.Module, pairs: Pairs,
        pipeline: Pipeline | None, free: tuple[str, ...],
    ) -> Models:  # fmt: skip
        """The two models; `pairs` are the tensors they have in common, `free` the rewritten modules."""
        kinds = {id(there): (here.dtype, here.device) for there, here in pairs.values()}
        depth = sum(bool(module._parameters) for module in prepared.modules())
        return cls(reference, prepared, pipeline, free, kinds, coarsest(prepared), depth)

    def exact(self, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
        """Stand-ins for the reference's tensors, where they are, in `dtype`."""
        return lambda tensor: single_run.cast(tensor, dtype, tensor.device)

    def plain(self, tensor: Tensor) -> Tensor:
        """A stand-in for one of the reference's tensors in the prepared one's dtype, contiguous."""
        return single_run.cast(tensor, *self.kinds.get(id(tensor), (tensor.dtype, tensor.device)))

    def rounded(self, tensor: Tensor) -> Tensor:
        """The same in float32: the values that are left in the prepared one's dtype."""
        plain = self.plain(tensor)
        return single_run.cast(plain, torch.float32, plain.device)


def coarsest(model: nn.Module) -> torch.dtype:
    """The coarsest floating-point dtype among a model's tensors; float32 where it has none."""
    kinds = {t.dtype for t in (*model.parameters(), *model.buffers()) if t.is_floating_point()}
    return max(kinds, key=lambda kind: torch.finfo(kind).eps, default=torch.float32)
