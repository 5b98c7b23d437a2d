"""The base of repairs: a change of a module's class, and helpers that keep the layout of its input.

A repaired module has a class named `Keeping...` (`KeepingGroupNorm`): a subclass of its original class
that keeps a channels-last layout through forward and backward.
"""

import functools
from collections.abc import Callable, Mapping
from functools import cache, lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from prepare.core.model.forward_code import forward_code, torch_class
from prepare.core.model.memory_format import canonical_stride
from prepare.core.model.module_kinds import (
    has_own_sizes,
    is_transformed,
    made_of,
    make_class,
    mark_repair,
    reshape_for_view,
    rows_copied,
    script_error,
)
from prepare.errors import RefusedError

FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
_PARAMETRIZED = "torch.nn.utils.parametrize"


class SwapClass:
    """Repair a module by changing its class: the same object, with its hooks.

    `repairs` are subclasses of torch's classes; `swaps` is `{torch's class: its repair}`. A module of a class
    that runs the code of torch's class gets one made of its own class and of the repair, which comes right
    before torch's class in the method resolution order: `super().forward(x)` in the user's code runs the
    repair. The repairs are defined at module level, so that models can be pickled and copied, and read all
    settings from the module. A weight may be computed each time it is read: a repair reads it once in a call.

    A repair writes into no tensor and adds no Parameter or buffer: `state_dict`, optimizers and references to
    the module stay valid. A repair that changes no class has no `swaps`.
    """

    step: ClassVar[str] = "repair_layout"

    def __init__(self, name: str, *repairs: Any) -> None:
        self.name = name
        self._originals = {mark_repair(keeping): torch_class(keeping) for keeping in repairs}
        self.swaps = {original: keeping for keeping, original in self._originals.items()}
        for keeping in repairs:
            keeping.forward = _dispatched(keeping)
            keeping.__prepare_scriptable__ = _refusing_script(self.step)

    def concerns(self, module: nn.Module) -> bool:
        """Return whether this module is of a kind that this repair is for, whatever code it runs. Pure."""
        cls: Any = type(module)  # a class is hashable, which mypy denies
        return torch_class(cls) in self.swaps and has_own_sizes(module)

    def fits(self, module: nn.Module) -> bool:
        """Return whether a repair of this module would take effect, and it has none yet. Pure."""
        cls: Any = type(module)
        return (
            self.concerns(module)
            and not self.is_repaired(module)
            and _can_be_made_of(cls)
            and forward_code(module).runs(self.swaps[torch_class(cls)])
        )

    def ranks(self, module: nn.Module) -> tuple[int, ...]:
        """Return the ranks of the inputs for which this module is repaired."""
        cls: Any = type(module)
        ranks: dict[str, tuple[int, ...]] = {"2d": (4,), "3d": (5,)}
        return ranks.get(torch_class(cls).__name__[-2:], (4, 5))

    def repair(self, module: nn.Module, formats: Mapping[int, str]) -> None:
        """Repair `module` in place, for inputs of these ranks: `{5: "channels_last_3d"}`."""
        module.__class__ = self._repaired(type(module))

    def is_repaired(self, module: nn.Module) -> bool:
        """Return whether `module` has this repair."""
        return isinstance(module, tuple(self._originals))

    def mends(self, module: nn.Module) -> bool:
        """Return whether `module` has this repair, and a call runs it."""
        return self.is_repaired(module) and forward_code(module).repaired

    def undo(self, module: nn.Module) -> None:
        """Remove the repair from `module`.

        Raises:
            RefusedError: its class was changed since, in a way that cannot be told apart from the repair.
        """
        module.__class__ = self._without(type(module))

    def _repaired(self, cls: Any) -> Any:
        if cls in self.swaps:
            return self.swaps[cls]
        if cls.__module__ == _PARAMETRIZED:
            return _rebased(cls, self._repaired(cls.__base__))
        keeping: Any = self.swaps[torch_class(cls)]
        return subclass_of(cls, keeping)

    def _without(self, cls: Any) -> Any:
        if cls in self._originals:
            return self._originals[cls]
        if cls.__module__ == _PARAMETRIZED:
            return _rebased(cls, self._without(cls.__base__))
        if made := made_of(cls):
            return made[0]
        wrong = f"{cls.__qualname__} was derived from the class of a repaired module"
        raise RefusedError(self.step, wrong, "undo first what gave the module this class")


@cache
def subclass_of(own: Any, keeping: Any) -> Any:
    """Return the class `Keeping...` made of a user's class and a repair: the same class each time."""
    members = {"__module__": keeping.__module__, "__doc__": own.__doc__}
    name = keeping.__name__.removesuffix(torch_class(keeping).__name__) + own.__name__
    return mark_repair(make_class(name, (own, keeping), members, subclass_of, own, keeping))


def _can_be_made_of(cls: Any) -> bool:
    """Return whether a class is torch's own, a user's, or one of a parametrized module."""
    if cls.__module__ == _PARAMETRIZED:
        return _can_be_made_of(cls.__base__)
    # Sharded and quantized modules have classes of torch, which are looked for by identity.
    return torch_class(cls) is cls or not cls.__module__.startswith("torch.")


def _rebased(cls: Any, base: Any) -> Any:
    """Return the class of a parametrized module with another base: torch makes one for each module."""
    members = {k: v for k, v in vars(cls).items() if k not in {"__dict__", "__weakref__"}}
    return type(cls)(cls.__name__, (base,), members)


def _dispatched(keeping: Any) -> Callable[..., Any]:
    """Return the forward of a repair for whoever calls it: it runs that of the module's present class.

    A hook may hold it as a bound method when the repair is undone. In a graph of torch.fx a repaired module
    is one node, as a module of torch is.
    """
    forward = keeping.forward

    @functools.wraps(forward)
    def dispatched(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self, keeping):
            return type(self).forward(self, *args, **kwargs)
        x = args[0] if args else kwargs.get("input")
        if not isinstance(x, Proxy) or x.tracer.root is self:  # type: ignore[attr-defined]
            return forward(self, *args, **kwargs)
        tracer: Any = x.tracer
        reshape_for_view(tracer)
        return tracer.create_proxy("call_module", tracer.path_of_module(self), args, kwargs)

    dispatched.__module__ = __name__
    return dispatched


def _refusing_script(step: str) -> Callable[[nn.Module], None]:
    def refuse(module: nn.Module) -> None:
        raise script_error(module, step)

    return refuse


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


def not_a_view(x: Tensor, *, is_saved: bool = False) -> Tensor:
    """Return `x`, a view of a result that nobody else holds, as a tensor of its own on the same memory.

    Modules of torch return no views, on which `detach_()` raises, and so do changes in place of what was
    computed in `no_grad`. `is_saved` is whether the backward of the result reads it: then a change of the
    returned tensor in place is an error in backward, as in torch.
    """
    is_dual = torch.autograd.forward_ad._current_level >= 0  # `x.data` has no tangent
    if torch.compiler.is_compiling() or is_transformed() or torch.jit.is_tracing() or is_dual:
        return x
    # Not torch's `_unsafe_view`: it changes the strides of dimensions of size 1.
    return _Result.apply(x, is_saved) if x.requires_grad else x.data


class _Result(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, is_saved: bool) -> Tensor:  # noqa: FBT001
        y = x.data
        if is_saved:
            ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        _ = ctx.saved_tensors  # raises if the saved result was changed in place
        return grad, None

    @staticmethod
    def jvp(_: Any, tangent: Tensor, __: None) -> Tensor:
        return tangent.view_as(tangent)


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
