"""Avoid convolutions whose backward in torch may read or write memory out of bounds.

This is the known issue conv3d_bfloat16_small_cpu. It may crash the process long after the backward.
"""

from __future__ import annotations

from typing import Any, Self

from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from prepare.steps.repairs.conv3d import REPAIR, backward_exceeds_memory


def repair_convolutions(model: nn.Module) -> None:
    """Repair all convolutions that run torch's own code; only for a model that is restored afterwards."""
    for module in model.modules():
        if REPAIR.fits(module):
            REPAIR.repair(module, {})


class UnsafeBackwardDetector:
    """While entered, sets `unsafe_module` to the first module of a forward whose backward is not safe."""

    def __init__(self, model: nn.Module) -> None:
        self.unsafe_module: str | None = None
        self._names = {id(module): name for name, module in model.named_modules()}

    def __enter__(self) -> Self:
        self._handle = torch_module.register_module_forward_hook(self._check)
        return self

    def __exit__(self, *raised: object) -> None:
        self._handle.remove()

    def _check(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.unsafe_module is not None or id(module) not in self._names:
            return
        is_tensor_call = args and isinstance(args[0], Tensor) and isinstance(output, Tensor)
        if is_tensor_call and backward_exceeds_memory(module, args[0], output):
            self.unsafe_module = self._names[id(module)]
