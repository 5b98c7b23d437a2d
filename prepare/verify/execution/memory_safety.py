"""Keeps a verification within its memory: where torch's backward of a convolution may go beyond it.

That is the known issue conv3d_bfloat16_small_cpu. A process that was hit by it may break down much later.
"""

from __future__ import annotations

from typing import Any, Self

from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from prepare.steps.repairs.conv3d import REPAIR, goes_beyond


def repair(model: nn.Module) -> None:
    """Repairs all convolutions that torch's own classes run; only for a model that is set back."""
    for module in model.modules():
        if REPAIR.fits(module):
            REPAIR.repair(module, {})


class Bounds:
    """While it is entered, notes in `beyond` the first module of a forward whose backward is not safe."""

    def __init__(self, model: nn.Module) -> None:
        self.beyond: str | None = None
        self._names = {id(module): name for name, module in model.named_modules()}

    def __enter__(self) -> Self:
        self._handle = torch_module.register_module_forward_hook(self._look)
        return self

    def __exit__(self, *raised: object) -> None:
        self._handle.remove()

    def _look(self, module: nn.Module, args: Any, output: Any) -> None:
        known = self.beyond is None and id(module) in self._names
        tensors = args and isinstance(args[0], Tensor) and isinstance(output, Tensor)
        if known and tensors and goes_beyond(module, args[0], output):
            self.beyond = self._names[id(module)]
