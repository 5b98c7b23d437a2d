"""The two models of a verification, and stand-ins for the reference's tensors in other dtypes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from prepare.core.model.quantized import float_values, is_int8, quantizes_inputs, rounded_like
from prepare.core.model.tensors import is_plain
from prepare.verify.execution.perturbation import RoundedInputs
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
    with parameters. `quantized` holds the prepared weights in 8 bits, by the id of the reference's tensor.
    """

    reference: nn.Module
    prepared: nn.Module
    pipeline: Pipeline | None
    rewritten: tuple[str, ...]
    targets: Mapping[int, tuple[torch.dtype, torch.device]]
    dtype: torch.dtype
    depth: int
    amp: str = "none"
    quantized: Mapping[int, Tensor] = field(default_factory=dict)

    @classmethod
    def of(
        cls, reference: nn.Module, prepared: nn.Module, pairs: TensorPairs,
        pipeline: Pipeline | None, rewritten: tuple[str, ...], *, amp: str = "none",
    ) -> ModelPair:  # fmt: skip
        """Create the pair; `pairs` are the tensors that both models have in common."""
        targets = {id(original): (t.dtype, t.device) for original, t in pairs.values()}
        depth = sum(bool(module._parameters) for module in prepared.modules())
        dtype = coarsest_dtype(prepared, *([getattr(torch, amp)] if amp != "none" else []))
        quantized = {
            id(original): tensor
            for original, tensor in pairs.values()
            if is_int8(tensor) and is_plain(original)
        }
        return cls(reference, prepared, pipeline, rewritten, targets, dtype, depth, amp, quantized)

    def exact_stand_in(self, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
        """Return a function that casts the reference's tensors to `dtype`, on their own devices."""
        return lambda tensor: cast(tensor, dtype, tensor.device)

    def baseline_stand_in(self, tensor: Tensor) -> Tensor:
        """Cast one of the reference's tensors to the prepared model's dtype and device, contiguous.

        A weight that is quantized in the prepared model is rounded to as many bits, by our own code.
        """
        values = cast(tensor, *self.targets.get(id(tensor), (tensor.dtype, tensor.device)))
        if (weight := self.quantized.get(id(tensor))) is not None:
            with torch.no_grad():
                values.copy_(rounded_like(values.float(), weight))
        return values

    def alone_stand_in(self, tensor: Tensor) -> Tensor:
        """Return the same with the very values that the prepared model's quantized weight stands for."""
        values = self.baseline_stand_in(tensor)
        if (weight := self.quantized.get(id(tensor))) is not None:
            with torch.no_grad():
                values.copy_(float_values(weight))
        return values

    def rounding_inputs(self) -> AbstractContextManager[object]:
        """Return a context in which the reference's modules round their inputs as the prepared ones do."""
        weights = {
            id(module): weight
            for module in self.reference.modules()
            if (weight := self.quantized.get(id(module._parameters.get("weight")))) is not None
            and quantizes_inputs(weight)
        }
        return RoundedInputs(weights) if weights else nullcontext()

    def rounded_stand_in(self, tensor: Tensor) -> Tensor:
        """Return the same tensor in float32, with its values rounded to the prepared model's dtype."""
        rounded = self.baseline_stand_in(tensor)
        return cast(rounded, torch.float32, rounded.device)


def coarsest_dtype(model: nn.Module, *others: torch.dtype) -> torch.dtype:
    """Return the coarsest floating-point dtype of a model's tensors and `others`; float32 without any."""
    dtypes = {t.dtype for t in (*model.parameters(), *model.buffers()) if t.is_floating_point()}
    dtypes.update(others)
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)
