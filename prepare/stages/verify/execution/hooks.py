"""Hooks of all modules around a forward: they change outputs or inputs, or look for an unsafe backward.

The backward of some calls in torch reads or writes memory out of bounds, and may end the process long after:
the known issues of the part `memory`. Such a backward is not run.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from prepare.core.model.memory_format import canonical_stride
from prepare.core.model.unsafe_backward import UnsafeCalls
from prepare.steps.repairs.conv3d import REPAIR, backward_exceeds_memory

if TYPE_CHECKING:
    from collections.abc import Callable

_NORMS = (_BatchNorm, _InstanceNorm, nn.GroupNorm)


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
    """While entered, sets `unsafe_module` to the first module of a forward whose backward is not safe.

    `issue` is then the known issue. Calls of torch itself are not seen inside of compiled code.
    """

    def __init__(self, model: nn.Module, *, compiled: bool = False) -> None:
        self.unsafe_module: str | None = None
        self.issue = ""
        self._names = {id(module): name for name, module in model.named_modules()}
        self._running: list[str] = []
        self._calls, self._patch = None if compiled else UnsafeCalls(), ExitStack()

    def __enter__(self) -> Self:
        if self._calls is not None:
            self._patch.enter_context(self._calls)
            self._patch.enter_context(torch_module.register_module_forward_pre_hook(self._on_call))
        return super().__enter__()

    def __exit__(self, *raised: object) -> None:
        super().__exit__(*raised)
        self._patch.close()

    def _on_call(self, module: nn.Module, _: Any) -> None:
        if id(module) in self._names:
            self._look()
            self._running.append(self._names[id(module)])

    def on_output(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.unsafe_module is not None or id(module) not in self._names:
            return
        is_tensor_call = args and isinstance(args[0], Tensor) and isinstance(output, Tensor)
        if is_tensor_call and backward_exceeds_memory(module, args[0], output):
            self.unsafe_module = self._names[id(module)]
            self.issue = "conv3d_bfloat16_small_cpu"
        self._look()
        if self._running:
            self._running.pop()

    def _look(self) -> None:
        """Name the module that runs, if a call in it was the first unsafe one."""
        if self._calls is not None and self._calls.issue and self.unsafe_module is None:
            self.unsafe_module = self._running[-1] if self._running else ""
            self.issue = self._calls.issue


class ContiguousNorms(OutputHook):
    """While entered, norms get contiguous inputs and gradients with exact strides; torch misreads others."""

    def __enter__(self) -> Self:
        self._before = torch_module.register_module_forward_pre_hook(self._on_inputs)
        return super().__enter__()

    def __exit__(self, *raised: object) -> None:
        super().__exit__(*raised)
        self._before.remove()

    def _on_inputs(self, module: nn.Module, args: Any) -> Any:
        if isinstance(module, _NORMS) and args and isinstance(args[0], Tensor):
            return (_contiguous(args[0]), *args[1:])
        return None

    def on_output(self, module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(module, _NORMS) and isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(_contiguous)


def _contiguous(tensor: Tensor) -> Tensor:
    """Return the tensor with the canonical contiguous strides, also for dimensions of size 1."""
    if tensor.layout is not torch.strided or tensor.stride() == canonical_stride(
        tensor.shape, "contiguous"
    ):
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def repair_convolutions(model: nn.Module) -> None:
    """Repair all convolutions that run torch's own code; only for a model that is restored afterwards."""
    for module in model.modules():
        if REPAIR.fits(module):
            REPAIR.repair(module, {})
