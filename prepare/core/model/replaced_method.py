"""Methods, classes and hooks that a step puts in place of a module's own code, and their pickles."""

from __future__ import annotations

import copy
import copyreg
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from types import CodeType, FunctionType
from typing import Any, ClassVar

from torch.compiler import is_compiling

from prepare.errors import PrepareError, Problem


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
