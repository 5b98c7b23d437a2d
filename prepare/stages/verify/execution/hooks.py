"""Hooks of all modules around a forward: they change outputs or inputs, or look for an unsafe backward.

The backward of some convolutions in torch may read or write memory out of bounds, and crash the process long
after: the known issue conv3d_bfloat16_small_cpu. Such a convolution is repaired, or its backward is skipped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from prepare.steps.repairs.conv3d import REPAIR, backward_exceeds_memory


class OutputHook:
    """While entered, gets the arguments and the output of every call of a module; may be entered again."""

    def __enter__(self) -> Self:
        self._handle = torch_module.register_module_forward_hook(self.on_output)
        return self

    def __exit__(self, *raised: object) -> None:
        self._handle.remove()

    def on_output(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Handle one call; return another output, or None."""
        raise NotImplementedError


class ChangedOutputs(OutputHook):
    """While entered, replaces the output of each leaf module by `change` of it, unless that is None."""

    def __init__(self, model: nn.Module, change: Callable[[Tensor], Tensor | None]) -> None:
        self._leaves = {id(module) for module in model.modules() if not module._modules}
        self._change = change

    def on_output(self, module: nn.Module, args: Any, output: Any) -> Any:
        is_float = isinstance(output, Tensor) and output.is_floating_point() and output.numel() > 1
        return self._change(output) if is_float and id(module) in self._leaves else None


def perturbed(model: nn.Module, fraction: float, seed: int) -> ChangedOutputs:
    """Add noise of `fraction` of its standard deviation to the output of each leaf module.

    The change of the gradients is the error that they may have: with a forward error of this size, some
    ReLUs switch and the maximum of some pooling windows changes. Uses its own random numbers.
    """
    generator = torch.Generator().manual_seed(seed)

    def change(output: Tensor) -> Tensor | None:
        # In backward a checkpointed segment runs again, without noise: new noise would not match.
        if torch._C._current_autograd_node() is not None:
            return None
        noise = torch.randn(output.shape, generator=generator)
        scale = fraction * output.detach().float().std()
        return output + (noise.to(output.device) * scale).to(output.dtype)

    return ChangedOutputs(model, change)


def rounded(model: nn.Module, dtype: torch.dtype) -> ChangedOutputs:
    """Round the output of each leaf module, and its gradient, to `dtype`.

    So a model in float32 has about the error that it would have in 16 bits.
    """
    return ChangedOutputs(model, lambda output: output.to(dtype).to(output.dtype))


class UnsafeBackwardDetector(OutputHook):
    """While entered, sets `unsafe_module` to the first module of a forward whose backward is not safe."""

    def __init__(self, model: nn.Module) -> None:
        self.unsafe_module: str | None = None
        self._names = {id(module): name for name, module in model.named_modules()}

    def on_output(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.unsafe_module is not None or id(module) not in self._names:
            return
        is_tensor_call = args and isinstance(args[0], Tensor) and isinstance(output, Tensor)
        if is_tensor_call and backward_exceeds_memory(module, args[0], output):
            self.unsafe_module = self._names[id(module)]


def repair_convolutions(model: nn.Module) -> None:
    """Repair all convolutions that run torch's own code; only for a model that is restored afterwards."""
    for module in model.modules():
        if REPAIR.fits(module):
            REPAIR.repair(module, {})
