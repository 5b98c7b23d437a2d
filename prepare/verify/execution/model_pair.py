"""The two models of a verification, and stand-ins for the reference's tensors in other dtypes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from prepare.verify.execution.single_run import cast

if TYPE_CHECKING:
    from prepare.pipeline import Pipeline
    from prepare.verify.static_checks import TensorPairs


@dataclass(frozen=True)
class ModelPair:
    """The reference and the prepared model, and the dtypes and devices of the prepared model's tensors.

    `rewritten` names the modules whose tensors a structure step replaced. `targets` holds the dtype and
    device of each prepared tensor, by the id of the reference's tensor. `dtype` is the coarsest dtype of the
    prepared model, or that of `amp`, the autocast in which it runs. `depth` is the number of its modules
    with parameters.
    """

    reference: nn.Module
    prepared: nn.Module
    pipeline: Pipeline | None
    rewritten: tuple[str, ...]
    targets: Mapping[int, tuple[torch.dtype, torch.device]]
    dtype: torch.dtype
    depth: int
    amp: str = "none"

    @classmethod
    def of(
        cls, reference: nn.Module, prepared: nn.Module, pairs: TensorPairs,
        pipeline: Pipeline | None, rewritten: tuple[str, ...], *, amp: str = "none",
    ) -> ModelPair:  # fmt: skip
        """Create the pair; `pairs` are the tensors that both models have in common."""
        targets = {id(original): (t.dtype, t.device) for original, t in pairs.values()}
        depth = sum(bool(module._parameters) for module in prepared.modules())
        dtype = coarsest_dtype(prepared, *([getattr(torch, amp)] if amp != "none" else []))
        return cls(reference, prepared, pipeline, rewritten, targets, dtype, depth, amp)

    def exact_stand_in(self, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
        """Return a function that casts the reference's tensors to `dtype`, on their own devices."""
        return lambda tensor: cast(tensor, dtype, tensor.device)

    def baseline_stand_in(self, tensor: Tensor) -> Tensor:
        """Cast one of the reference's tensors to the prepared model's dtype and device, contiguous."""
        return cast(tensor, *self.targets.get(id(tensor), (tensor.dtype, tensor.device)))

    def rounded_stand_in(self, tensor: Tensor) -> Tensor:
        """Return the same tensor in float32, with its values rounded to the prepared model's dtype."""
        rounded = self.baseline_stand_in(tensor)
        return cast(rounded, torch.float32, rounded.device)


def coarsest_dtype(model: nn.Module, *others: torch.dtype) -> torch.dtype:
    """Return the coarsest floating-point dtype of a model's tensors and `others`; float32 without any."""
    dtypes = {t.dtype for t in (*model.parameters(), *model.buffers()) if t.is_floating_point()}
    dtypes.update(others)
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)
