"""Format the tensors of a nested batch: device, floating-point dtype, canonical strides by rank."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from prepare.core.forward.nested import map_tensors
from prepare.core.model.memory_format import canonical_stride
from prepare.core.model.module_tree import remove_hooks
from prepare.core.model.scripting import NotScriptable
from prepare.core.model.transforms import is_transformed, rows_copied


@dataclasses.dataclass(frozen=True)
class Formatter:
    """The device, dtype and memory format for the tensors of a batch; None leaves a property unchanged.

    `formats` maps a number of dimensions to a memory format; 0 means any number.
    """

    device: torch.device | None = None
    dtype: torch.dtype | None = None
    formats: tuple[tuple[int, str], ...] = ()

    def __call__(self, batch: Any) -> Any:
        """Return the formatted batch; the same object if nothing changes."""
        return map_tensors(self.tensor, batch)

    def tensor(self, tensor: Tensor) -> Tensor:
        """Return the formatted tensor; the same object if nothing changes. Differentiable."""
        device, dtype = tensor.device, tensor.dtype
        if self.device is not None and not _is_on(device, self.device):
            device = self.device
        if self.dtype is not None and tensor.is_floating_point():
            dtype = self.dtype
        same = device == tensor.device and dtype == tensor.dtype
        memory_format = self._format(tensor.dim())
        if memory_format is None or tensor.layout is not torch.strided or tensor.is_nested:
            if same:
                return tensor
            return tensor.to(device, dtype, non_blocking=_may_run_on(tensor, device))
        stride = canonical_stride(tensor.shape, memory_format)
        if same and tensor.stride() == stride:
            return tensor
        if torch.jit.is_tracing():  # a trace loses the copy into new memory, and reads garbage
            name = "contiguous_format" if memory_format == "contiguous" else memory_format
            return tensor.to(device, dtype).contiguous(memory_format=getattr(torch, name))
        if is_transformed():
            moved = tensor.to(device, dtype)
            return moved.contiguous() if memory_format == "contiguous" else rows_copied(moved)
        # Not `.contiguous(memory_format=...)`: it keeps strides that satisfy the format, canonical or not.
        fresh = torch.empty_strided(tensor.shape, stride, dtype=dtype, device=device)
        # torch's copy from float32 to float16 ignores the negative bit.
        source = tensor.resolve_neg()
        return fresh.copy_(source, non_blocking=_may_run_on(source, device))

    def _format(self, rank: int) -> str | None:
        for dims, memory_format in self.formats:
            if dims in (rank, 0):
                return memory_format
        return None


@dataclasses.dataclass(frozen=True)
class FormatHook(NotScriptable):
    """A forward pre-hook that formats positional and keyword arguments; it holds configuration only.

    As plain data it survives pickle and deepcopy, and an equal hook on the model is recognised.
    """

    step = "input_format"
    formatter: Formatter

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Any] | None:
        new_args, new_kwargs = self.formatter(args), self.formatter(kwargs)
        if new_args is args and new_kwargs is kwargs:
            return None
        return new_args, new_kwargs

    def is_on(self, model: nn.Module) -> bool:
        """Return whether `model` has a hook equal to this one."""
        return self in model._forward_pre_hooks.values()

    def install(self, model: nn.Module) -> None:
        """Register the hook before all others, and remove any other formatting hook."""
        FormatHook.remove(model)
        model.register_forward_pre_hook(self, with_kwargs=True, prepend=True)

    @staticmethod
    def remove(model: nn.Module) -> None:
        """Remove every formatting hook from `model`."""
        remove_hooks(model, FormatHook)


def _may_run_on(tensor: Tensor, device: torch.device) -> bool:
    """Return whether the copy to `device` may still run when the forward begins.

    Not towards the CPU: it would read a batch that has not arrived, while an accelerator queues its work. Not
    from pageable memory, which the caller may write to again, nor in a graph that a compiler makes.
    """
    is_sent = tensor.device.type == "cpu" and device.type not in ("cpu", "meta")
    return is_sent and not torch.compiler.is_compiling() and tensor.is_pinned()


def _is_on(device: torch.device, target: torch.device) -> bool:
    return device == target or (target.index is None and device.type == target.type)
