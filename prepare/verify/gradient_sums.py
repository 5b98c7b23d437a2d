"""Compare the gradients of the prepared model with those of its modules, which ran alone on its numbers.

A model may amplify rounding without any limit: the true gradient of a norm's weight before another norm is
zero, and what is left are the rounding errors of all that follows. If each module alone is right, and the
gradients of the whole model are those that its modules alone return, this is the only cause left. Memory that
two modules share would show here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prepare.core.forward.nested import tensors_in
from prepare.verify.tolerance import rounding_floor

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from prepare.verify.execution.module_calls import LoneRun, RecordedCall
    from prepare.verify.execution.single_run import RunResult


class GradientSums:
    """The sums of the gradients that the modules of a model return alone."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        first = {id(parameter): name for name, parameter in model.named_parameters()}
        every = model.named_parameters(remove_duplicate=False)
        self._names = {name: first[id(parameter)] for name, parameter in every}
        self._floor = rounding_floor(dtype, 1)
        self._parameters: dict[str, Tensor] = {}
        self._inputs: list[Tensor] = []
        self._differs = self._is_random = False

    def add(self, call: RecordedCall, run: LoneRun, result: RunResult) -> None:
        """Add one call of a module: `run` ran it alone, with this result."""
        self._is_random |= run.is_random
        for name, gradient in result.parameters.items():
            parameter = self._names.get(f"{call.module}.{name}".removeprefix("."))
            if parameter and gradient is not None:
                known = self._parameters.get(parameter)
                self._parameters[parameter] = gradient if known is None else known + gradient
        for child in call.children:
            for index, output in enumerate(tensors_in(child.outputs)):
                self._compare(child.output_gradients.get(index), run.gradient_of(output))
        if not call.module:
            gradients = run.argument_gradients(call)
            self._inputs = [gradient for gradient in gradients if gradient is not None]

    def agree_with(self, whole: RunResult) -> bool | None:
        """Return whether the gradients of the whole model are these; None if some of them were random."""
        if self._is_random:
            return None
        for name, gradient in whole.parameters.items():
            self._compare(gradient, self._parameters.get(name))
        inputs = [gradient for gradient in whole.inputs.values() if gradient is not None]
        if len(inputs) != len(self._inputs):
            return None
        for gradient, alone in zip(inputs, self._inputs, strict=True):
            self._compare(gradient, alone)
        return not self._differs

    def _compare(self, whole: Tensor | None, alone: Tensor | None) -> None:
        if whole is None or alone is None:
            present = alone if whole is None else whole
            self._differs |= present is not None and bool(present.any())
        else:
            largest = float(whole.abs().max()) if whole.numel() else 0.0
            difference = whole - alone
            is_equal = (
                not difference.numel() or float(difference.abs().max()) <= self._floor * largest
            )
            self._differs |= not is_equal
