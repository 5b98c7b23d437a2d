"""Repair a user's subclass of a convolution: put the repair between its own forward and torch's."""

import inspect
from collections.abc import Iterator, Mapping
from functools import cache
from types import CodeType
from typing import Any

from torch import nn

from prepare.core.model.made_class import made_of, make_class
from prepare.core.model.module_kinds import mark_repair
from prepare.steps.repairs.base import SwapClass


class SwapConvolution(SwapClass):
    """As `SwapClass`, also for a user's subclass whose own forward runs that of torch's class.

    Such a module gets a class made of its own class and of the repair, which comes right before torch's
    class in the method resolution order: `super().forward(x)` in the user's code runs the repair.
    """

    def fits(self, module: nn.Module) -> bool:
        return super().fits(module) or self._subclass(module) is not None

    def ranks(self, module: nn.Module) -> tuple[int, ...]:
        return {"2d": (4,), "3d": (5,)}[self._torch_class(module).__name__[-2:]]

    def repair(self, module: nn.Module, formats: Mapping[int, str]) -> None:
        made = self._subclass(module)
        if made is None:
            super().repair(module, formats)
        else:
            module.__class__ = made

    def is_repaired(self, module: nn.Module) -> bool:
        return super().is_repaired(module) or self._own_class(module) is not None

    def undo(self, module: nn.Module) -> None:
        own = self._own_class(module)
        if own is None:
            super().undo(module)
        else:
            module.__class__ = own

    def cannot_reach(self, module: nn.Module) -> bool:
        """Return whether it is of a user's subclass whose own forward runs a convolution in another way."""
        is_ours = self.is_repaired(module) or super().fits(module) or self.fits(module)
        is_torchs = type(module).__module__.startswith("torch.")
        return isinstance(module, tuple(self.swaps)) and not is_ours and not is_torchs

    def _torch_class(self, module: nn.Module) -> type[nn.Module]:
        return next(cls for cls in type(module).__mro__ if cls in self.swaps)

    def _subclass(self, module: nn.Module) -> type[nn.Module] | None:
        """Return the repaired class for a module of a user's class; None if that cannot be repaired."""
        own: Any = type(module)  # a class is hashable, which mypy denies
        # Parametrized and sharded modules have classes of torch, which are taken off again.
        is_users = not own.__module__.startswith(("torch.", "prepare."))
        if not is_users or not isinstance(module, tuple(self.swaps)):
            return None
        base: Any = self._torch_class(module)
        keeping: Any = self.swaps[base]
        return subclass_of(own, keeping) if _runs(own, base) else None

    def _own_class(self, module: nn.Module) -> type[nn.Module] | None:
        """Return the user's class of which the class of a repaired module was made."""
        own, keeping = made_of(type(module)) or (None, None)
        return own if keeping in self._originals else None


@cache
def subclass_of(own: Any, keeping: Any) -> Any:
    """Return the class `Keeping...` made of a user's class and a repair: the same class each time."""
    members = {"__module__": keeping.__module__, "__doc__": own.__doc__}
    name = f"Keeping{own.__name__}"
    return mark_repair(make_class(name, (own, keeping), members, subclass_of, own, keeping))


@cache
def _runs(own: Any, base: Any) -> bool:
    """Return whether the forward of a subclass runs the one of `base`, which the repair replaces."""
    if own._conv_forward is not base._conv_forward:
        return False
    before = own.__mro__[: own.__mro__.index(base)]
    forwards = [vars(cls)["forward"] for cls in before if "forward" in vars(cls)]
    return all(not _NAMES.isdisjoint(_names(inspect.unwrap(each))) for each in forwards)


_NAMES = frozenset({"forward", "_conv_forward"})


def _names(function: Any) -> Iterator[str]:
    """Yield the names that the code of a function uses, also in functions and comprehensions inside."""
    codes = [function.__code__] if hasattr(function, "__code__") else []
    for code in codes:
        yield from code.co_names
        codes += [each for each in code.co_consts if isinstance(each, CodeType)]
