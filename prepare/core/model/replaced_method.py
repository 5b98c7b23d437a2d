"""A method that a step has put on one module, in place of the method of its class."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from torch.compiler import is_compiling

from prepare.core.model.scripting import script_error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import CodeType, FunctionType


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
