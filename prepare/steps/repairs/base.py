"""The base classes of repairs, which make a module keep the layout of its input, and what they share.

A repaired module has a class named `Keeping...` (`KeepingGroupNorm`): a subclass of its original class
that keeps a channels-last layout through forward and backward.
"""

import functools
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from prepare.core.model.memory_format import canonical_stride
from prepare.core.model.module_kinds import mark_repair
from prepare.core.model.scripting import script_error
from prepare.core.model.transforms import is_transformed, rows_copied

FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def is_channels_last(x: Tensor) -> bool:
    """Return whether `x` is in the channels-last format of its rank, and not also in the contiguous format.

    With one channel, or one spatial element, the strides may satisfy both; then the strides of the
    channels and of the last dimension decide.
    """
    if x.dim() not in FORMATS:
        return False
    # Not `is_contiguous`, which `vmap` does not support for these formats.
    last, step, sizes, strides = x.dim() - 1, 1, x.shape, x.stride()
    for dim in (1, *range(last, 1, -1), 0):
        if strides[dim] != step and (sizes[dim] != 1 or dim in (1, last)):
            return False
        step *= sizes[dim]
    return True


def with_exact_strides(x: Tensor) -> Tensor:
    """Return `x` with the canonical channels-last strides of its shape, also for dimensions of size 1.

    torch's kernels look at every stride (pytorch#113437).
    """
    strides = _strides(x.shape)
    if x.stride() == strides:
        return x
    if is_channels_last(x):
        return x.as_strided(x.shape, strides)
    return x.clone(memory_format=FORMATS[x.dim()])


def with_channels_last_grad(x: Tensor) -> Tensor:
    """Return `x` itself; its gradient will have the exact strides of channels-last.

    Compilers and torch.func choose the layout of gradients themselves.
    """
    if torch.compiler.is_compiling() or is_transformed():
        return x
    return _ChannelsLastGrad.apply(x)


def memory_dim(dim: int, rank: int) -> int:
    """Return the position of a dimension of (N, C, *spatial) in memory, in (N, *spatial, C)."""
    dim %= rank
    return dim and (dim - 2) % (rank - 1) + 1


def to_channels_last(x: Tensor) -> Tensor:
    """Return `x` in the channels-last format of its rank; `x` itself if its strides satisfy that."""
    return rows_copied(x) if is_transformed() else x.to(memory_format=FORMATS[x.dim()])


class Repair:
    """Make modules of one kind keep the layout of a channels-last input, at torch's accuracy or better.

    Each file in this folder holds one, named `REPAIR`. A repair writes into no tensor and adds no
    Parameter or buffer: `state_dict`, optimizers and references to the module stay valid.
    """

    name: str

    def fits(self, module: nn.Module) -> bool:
        """Return whether this module is of a kind that this repair handles, and not repaired yet. Pure."""
        raise NotImplementedError

    def ranks(self, module: nn.Module) -> tuple[int, ...]:
        """Return the input ranks for which this module is repaired, derived from its class name."""
        return {"2d": (4,), "3d": (5,)}.get(type(module).__name__[-2:], (4, 5))

    def repair(self, module: nn.Module, formats: Mapping[int, str]) -> None:
        """Repair `module` in place, for inputs of these ranks: `{5: "channels_last_3d"}`."""
        raise NotImplementedError

    def is_repaired(self, module: nn.Module) -> bool:
        """Return whether `module` has this repair."""
        raise NotImplementedError

    def undo(self, module: nn.Module) -> None:
        """Remove the repair from `module`."""
        raise NotImplementedError


class SwapClass(Repair):
    """Repair a module by changing its class to a subclass: the same object, with its hooks.

    `swaps` is `{torch's class: the subclass}`. Only modules of exactly such a class fit; a user's subclass
    may do anything in its forward, and is not repaired. The subclasses are defined at module level, so that
    models can be pickled and copied, and read all settings from the module.
    """

    def __init__(self, name: str, swaps: Mapping[type[nn.Module], type[nn.Module]]) -> None:
        self.name = name
        self.swaps = {original: mark_repair(keeping) for original, keeping in swaps.items()}
        for keeping in swaps.values():
            keeping.forward = _one_node_of_fx(keeping.forward)
            keeping.__prepare_scriptable__ = _refuse_script  # type: ignore[attr-defined]
        self._originals = {keeping: original for original, keeping in swaps.items()}

    def fits(self, module: nn.Module) -> bool:
        return type(module) in self.swaps

    def repair(self, module: nn.Module, formats: Mapping[int, str]) -> None:
        module.__class__ = self.swaps[type(module)]

    def is_repaired(self, module: nn.Module) -> bool:
        return type(module) in self._originals

    def undo(self, module: nn.Module) -> None:
        module.__class__ = self._originals[type(module)]


class _ChannelsLastGrad(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_: Any, grad: Tensor) -> Tensor:
        return rows_copied(grad) if is_transformed() else with_exact_strides(grad)

    @staticmethod
    def jvp(_: Any, tangent: Tensor) -> Tensor:
        return tangent.view_as(tangent)


@lru_cache(maxsize=65536)
def _strides(shape: torch.Size) -> tuple[int, ...]:
    return canonical_stride(shape, {4: "channels_last", 5: "channels_last_3d"}[len(shape)])


def _one_node_of_fx(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Make a repaired module one node in a graph of torch.fx, as a module of torch is."""

    @functools.wraps(forward)
    def traced(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        x = args[0] if args else None
        if not isinstance(x, Proxy) or x.tracer.root is self:  # type: ignore[attr-defined]
            return forward(self, *args, **kwargs)
        tracer: Any = x.tracer
        return tracer.create_proxy("call_module", tracer.path_of_module(self), args, kwargs)

    traced.__module__ = __name__
    return traced


def _refuse_script(module: nn.Module) -> None:
    raise script_error(module, "repair_layout")
