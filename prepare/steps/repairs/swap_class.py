"""Repair a module by its class: a subclass of torch's, or one made of that and of a user's class."""

import functools
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, ClassVar

from torch import nn
from torch.fx import Proxy

from prepare.core.model import module_kinds
from prepare.core.model.forward_code import forward_code, torch_class
from prepare.core.model.module_kinds import made_of, make_class, mark_repair
from prepare.errors import RefusedError

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
        return torch_class(cls) in self.swaps

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
        module_kinds.reshape_for_view(tracer)
        return tracer.create_proxy("call_module", tracer.path_of_module(self), args, kwargs)

    dispatched.__module__ = __name__
    return dispatched


def _refusing_script(step: str) -> Callable[[nn.Module], None]:
    def refuse(module: nn.Module) -> None:
        raise module_kinds.script_error(module, step)

    return refuse
