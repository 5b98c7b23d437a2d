"""Recognise modules, and make the methods, classes and hooks that steps put in place of their code."""

from __future__ import annotations

import copy
import copyreg
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from types import CodeType, FunctionType
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.fx import Proxy
from torch.fx.proxy import TracerBase

from prepare.errors import PrepareError, Problem

TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, *TRANSPOSED)
# Convolutions with a weight of 4 or 5 dimensions: only these have a channels-last format.
CONVOLUTIONS_2D_3D = (nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d, nn.ConvTranspose3d)


_Class = TypeVar("_Class", bound=type)
_MARK = "_prepare_repair"
# Where the classes of repairs, and of rewritten convolutions, are defined.
REPAIRS = ("prepare.steps.repairs.",)


def mark_repair(cls: _Class) -> _Class:
    """Mark `cls` as a repair: a class decorator. Subclasses are not marked."""
    setattr(cls, _MARK, cls)
    return cls


def is_repair(cls: type) -> bool:
    """Return whether `cls` itself was marked with `mark_repair`."""
    return vars(cls).get(_MARK) is cls


def has_own_sizes(module: nn.Module) -> bool:
    """Return whether a module has its sizes as torch's constructor of a convolution makes them: tuples.

    Other code may set a number or a list later (`conv.stride = 1`), which torch reads in the next call.
    """
    values = module.__dict__  # torch 2.5 compiles no vars
    sizes = (values.get(name) for name in ("kernel_size", "stride", "padding", "dilation"))
    return not isinstance(module, CONVOLUTIONS) or all(type(each) in (tuple, str) for each in sizes)


def reads_contiguous(module: nn.Module) -> bool:
    """Return whether a rewritten convolution reads a contiguous weight, whatever format is requested."""
    return getattr(module, "_reads_contiguous", False) is True


def is_rewritten(module: nn.Module) -> bool:
    """Return whether the step rewrite_conv has given a convolution another operation."""
    return bool(getattr(type(module), "rewritten_as", ""))


def operation_of(module: nn.Module) -> str:
    """Return what a convolution runs as: `conv3d`, or its rewrite, as `linear` or `fused + relu`."""
    if is_rewritten(module):
        return " + ".join((str(module.rewritten_as), *getattr(module, "chain", ())))
    kind = next(kind for kind in CONVOLUTIONS if isinstance(module, kind))
    return kind.__name__.replace("ConvTranspose", "conv_transpose").lower()


def script_error(module: Any, step: str) -> PrepareError:
    """Return the error for a module whose class a step has changed."""
    return PrepareError.of([_problem(f"{type(module).__name__}({module.extra_repr()})", step)])


class NotScriptable:
    """A base of hooks: torch.jit.script asks a hook for its `__name__` before it compiles anything."""

    step: ClassVar[str]
    """The module in `prepare.steps` that has installed the hook, and can `undo` it."""

    @property
    def __name__(self) -> str:
        raise AttributeError(str(_problem(f"the hook {type(self).__qualname__}", self.step)))


def _problem(where: str, step: str) -> Problem:
    wrong = f"torch.jit.script cannot compile it: the step {step} runs code of its own there"
    undo = f"from prepare.steps import {step}; {step}.undo(model)"
    return Problem(where, wrong, f"use torch.jit.trace or torch.export, or undo the step: {undo}")


_MADE_BY = "_prepare_made_by"


def make_class(
    name: str,
    bases: tuple[Any, ...],
    members: Mapping[str, Any],
    by: Callable[..., Any],
    *args: Any,
) -> Any:
    """Return a class like the first of `bases`; a pickle of it calls `by(*args)`, which makes it again."""
    kind: Any = type(bases[0])  # a class is hashable, which mypy denies
    return _metaclass(kind)(name, bases, {**members, _MADE_BY: (by, args)})


def made_of(cls: type) -> tuple[Any, ...]:
    """Return the arguments with which `cls` itself was made; nothing for another class."""
    return vars(cls).get(_MADE_BY, (None, ()))[1]


@cache
def _metaclass(kind: Any) -> Any:
    """Return a metaclass, a subclass of `kind`, whose classes are pickled by what makes them."""
    made = type.__new__(type(kind), kind.__name__, (kind,), {})
    copyreg.pickle(made, _reduce)
    return made


def _reduce(cls: type) -> Any:
    return vars(cls).get(_MADE_BY) or cls.__qualname__


class ReplacedMethod:
    """Call `function` with `module` as its first argument, as a bound method does.

    It lies among the attributes of the module, under the name of the method; the class of the module stays
    as it is. A copy or a pickle of the module has its own: `made_by(module, *args)` makes it again.
    `step` is the step that has put it there.
    """

    def __init__(  # noqa: PLR0917
        self,
        module: Any,
        name: str,
        function: FunctionType,
        made_by: Callable[..., ReplacedMethod],
        args: tuple[Any, ...],
        step: str,
    ) -> None:
        self.__self__, self.__func__, self.__name__ = module, function, name
        self.made_by, self.args, self.step = made_by, args, step
        self._replaced = getattr(type(module), name)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        module = self.__self__
        if not is_compiling() and getattr(type(module), self.__name__) is not self._replaced:
            # Another program has given the module a class with a method of its own.
            return self.__wrapped__(*args, **kwargs)
        return self.__func__(module, *args, **kwargs)

    def bound_to(self, module: Any) -> ReplacedMethod:
        """Return the same method of another module of this class."""
        return ReplacedMethod(
            module, self.__name__, self.__func__, self.made_by, self.args, self.step
        )

    @property
    def __wrapped__(self) -> Any:
        """The method of the class; `inspect` reads its signature and its source."""
        return getattr(type(self.__self__), self.__name__).__get__(self.__self__)

    @property
    def __code__(self) -> CodeType:
        """That of the function, as a bound method has it; torch.export asks for it."""
        return self.__func__.__code__

    @property
    def __globals__(self) -> Any:
        """An error: torch.jit.script asks for it, and would compile the method of the class."""
        raise AttributeError(str(script_error(self.__self__, self.step)))

    def __deepcopy__(self, memo: dict[int, Any]) -> ReplacedMethod:
        return self.bound_to(copy.deepcopy(self.__self__, memo))

    def __reduce__(self) -> Any:
        return self.made_by, (self.__self__, *self.args)


def replaced_methods(module: Any) -> Iterator[tuple[str, ReplacedMethod]]:
    """Yield the methods that steps have put on a module, and the attributes that hold them."""
    held = vars(module)
    if ReplacedMethod in map(type, held.values()):  # most modules have none
        yield from [each for each in held.items() if isinstance(each[1], ReplacedMethod)]


def foreign_method(module: Any, name: str) -> Any:
    """Return what runs on the module in the place of the method of its class, if no step has put it there."""
    method = vars(module).get(name)
    return None if isinstance(method, ReplacedMethod) else method


def is_transformed() -> bool:
    """Return whether a transform runs, as `vmap`, `grad` or `jvp`; also in a forward that is compiled."""
    return bool(torch._C._are_functorch_transforms_active())


def rows_copied(x: Tensor) -> Tensor:
    """Return `x` (N, C, *spatial) in channels-last, in operations that every transform knows."""
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


def reshape_for_view(tracer: Any) -> None:
    """Let this tracer record `reshape` for each `view` from now on: the code that runs may replace it.

    Not a tracer with proxies of its own.
    """
    if type(tracer).proxy is TracerBase.proxy:
        tracer.proxy = lambda node: _Reshaping(node, tracer)


def recorded_view(x: Proxy, *sizes: Any, **options: Any) -> Proxy:
    """Record `x.view(*sizes)`, as `reshape` unless a dtype is given."""
    is_shape = bool(sizes) and not options and not isinstance(sizes[0], torch.dtype)
    return x.tracer.create_proxy(
        "call_method", "reshape" if is_shape else "view", (x, *sizes), options
    )


class _Reshaping(Proxy):
    view = recorded_view
