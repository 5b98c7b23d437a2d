"""Tell which code a call of a module runs: torch's, that of a user's class, or a function on the instance."""

from __future__ import annotations

import gc
import inspect
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from prepare.core.model.module_kinds import REPAIRS, ReplacedMethod, is_repair
from prepare.core.model.module_tree import source_of

# The methods with which a call may begin, outermost first.
_ENTRIES = ("__call__", "_call_impl", "forward")
_TORCHS = ("torch.nn.modules.", *REPAIRS)
# How many objects are looked at, and not entered, for the old forward that a function on a module keeps.
_MOST_KEPT = 200
_NOT_ENTERED = (nn.Module, Tensor, type, ModuleType, str, int, CodeType)


@dataclass(frozen=True)
class ForwardCode:
    """The code that a call of a module runs, as far as its methods show.

    It follows `super()`, the name of torch's class, methods on `self` and functions of the user's file. Other
    code that names the method may run torch's.

    Attributes:
        torchs: the class in `torch.nn` from which the class of the module is derived; None if that is
            `nn.Module` alone.
        through: the methods of `torchs` that run and are found by the class of the module, so that a
            subclass which overrides one of them takes effect. Empty if other code does the same work too.
        alone: whether only code of `torchs` runs, or of a repair of it.
        runs_torchs: whether the work of `torchs` is done by its own method, or by other code which calls
            the same function, as `F.instance_norm`; also True for code that is not followed.
        repaired: whether code of a repair runs.
        replaced_by: the function that stands on the instance in place of a method, as
            `accelerate.hooks.add_hook_to_module.<locals>.new_forward`; empty if there is none.
    """

    torchs: type[nn.Module] | None
    through: frozenset[str]
    alone: bool
    runs_torchs: bool
    repaired: bool
    replaced_by: str

    def runs(self, repair: type) -> bool:
        """Return whether a method that `repair`, a subclass of `torchs`, overrides takes effect."""
        cls: Any = repair  # a class is hashable, which mypy denies
        return not _overridden(cls).isdisjoint(self.through)


def forward_code(module: nn.Module) -> ForwardCode:
    """Return the code that a call of `module` runs now; runs none of it."""
    cls: Any = type(module)
    own = not vars(module).keys().isdisjoint(_methods(torch_class(cls)))
    return _Search(cls, module).code() if own else _code_of(cls)


def may_read_mode(module: nn.Module) -> bool:
    """Return False if no method of the module's class reads its mode."""
    functions = (f for c in type(module).__mro__ if c is not nn.Module for f in vars(c).values())
    scripted = isinstance(module, torch.jit.ScriptModule)
    return scripted or any("training" in _names(each) for each in functions)


@cache
def torch_class(cls: Any) -> Any:
    """Return the class in `torch.nn` from which `cls` is derived; None if that is `nn.Module` alone."""
    base = next((c for c in cls.__mro__ if c.__module__.startswith("torch.nn.modules.")), None)
    return None if base is nn.Module else base


@cache
def _code_of(cls: Any) -> ForwardCode:
    return _Search(cls).code()


@cache
def _overridden(repair: Any) -> frozenset[str]:
    """Return the methods that do the work of a repair: not a `forward` which calls another of them."""
    functions = {name: getattr(repair, name) for name in _methods(torch_class(repair))}
    methods = frozenset(name for name, function in functions.items() if _is_of_repair(function))
    return methods - {"forward"} or methods


@cache
def _methods(torchs: Any) -> frozenset[str]:
    """Return the methods that decide on the result of a call: `forward`, and those that it calls."""
    reached, waiting = set(_ENTRIES), ["forward"]
    while torchs and waiting:
        for name in _names(getattr(torchs, waiting.pop())) - reached:
            is_method = isinstance(getattr(torchs, name, None), FunctionType)
            is_check = name.startswith("_check")  # a check returns nothing
            if is_method and name not in vars(nn.Module) and not is_check:
                reached.add(name)
                waiting.append(name)
    return frozenset(reached)


@cache
def _kernels(torchs: Any) -> frozenset[str]:
    """Return the functions of torch that do the work of a class."""
    used = {name for method in _methods(torchs) for name in _names(getattr(torchs, method, None))}
    names = {name for name in used if inspect.isroutine(vars(F).get(name)) and name[0] != "_"}
    names -= {"has_torch_function"}
    # The work of a pad, but only a help for a convolution.
    return frozenset(names - {"pad"} or names)


class _Search:
    """Follows a call from method to method."""

    def __init__(self, cls: Any, module: nn.Module | None = None) -> None:
        self.cls, self.torchs, self.module = cls, torch_class(cls), module
        self.methods, self.kernels = _methods(self.torchs), _kernels(self.torchs)
        self.on_instance = {} if module is None else vars(module)
        self.through: set[str] = set()
        self.alone, self.works, self.calls_kernel = self.torchs is not None, False, False
        self.replaced: list[str] = []
        self.seen: set[str] = set()

    def code(self) -> ForwardCode:
        defined = (vars(c).keys() for c in self.cls.__mro__ if c is not nn.Module)
        starts = {*self.on_instance}.union(*defined)
        self._look_up(next((name for name in _ENTRIES if name in starts), "forward"))
        through = frozenset() if self.calls_kernel else frozenset(self.through)
        works = self.works or self.calls_kernel or bool(self.replaced)
        repairs = [c for c in self.cls.__mro__ if is_repair(c)]
        repaired = bool(repairs) and not _overridden(repairs[-1]).isdisjoint(through)
        replaced = ", ".join(self.replaced)
        return ForwardCode(self.torchs, through, self.alone, works, repaired, replaced)

    def _look_up(self, name: str) -> None:
        """Follow `self.name`."""
        if name in self.seen:
            return
        self.seen.add(name)
        value = self.on_instance.get(name)
        self.alone &= value is None
        # A replaced method is that of the class, with some of its calls replaced.
        if value is None or isinstance(value, ReplacedMethod):
            self._follow(name, self.cls.__mro__)
            return
        self.replaced.append(_name_of(value))
        for kept in _kept(value, self.module):
            if isinstance(kept, FunctionType):
                self.calls_kernel |= not _names_in(kept.__code__).isdisjoint(self.kernels)
            elif kept.__name__ in self.methods:
                mro, function = self.cls.__mro__, kept.__func__
                owner = next((i for i, c in enumerate(mro) if function in vars(c).values()), 0)
                if _is_of_repair(function):  # it looks for the present class
                    self._follow(kept.__name__, mro)
                else:
                    self._enter(kept.__name__, function, mro[owner + 1 :])

    def _follow(self, name: str, classes: Sequence[Any]) -> None:
        """Follow the first method of this name in `classes`."""
        index = next(i for i, c in enumerate(classes) if name in vars(c))
        owner, function = classes[index], vars(classes[index])[name]
        if owner is nn.Module:
            if name != "forward":
                self._look_up("forward")
            return
        if owner.__module__.startswith(_TORCHS):
            # Another program may put a method of its own into a class of torch.
            self.works = True
            self.through |= {name} if _is_torchs(function) else set()
        else:
            self.alone = False
        self._enter(name, function, classes[index + 1 :])

    def _enter(self, name: str, function: Any, after: Sequence[Any]) -> None:
        """Follow what a method calls on `self`, and by `super()` in the classes `after`."""
        is_torchs = _is_torchs(function)
        used = _names(function) if is_torchs else _names_used(function, self.cls)
        inner = self.methods - {*_ENTRIES} | ({"forward"} if name in _ENTRIES[:-1] else set())
        if is_torchs:
            self.works = True
        else:
            self.alone = False
            self.calls_kernel |= not used.isdisjoint(self.kernels)
            is_followed = isinstance(inspect.unwrap(function), FunctionType)
            self.works |= not is_followed or not used.isdisjoint({name, "getattr"})
        for other in sorted(used & inner - {name}):
            self._look_up(other)
        if not is_torchs and {"super", name} <= used:
            self._follow(name, after)
        elif not is_torchs and {getattr(self.torchs, "__name__", ""), name} <= used:
            self._enter(name, getattr(self.torchs, name), ())  # called by the name of the class


def _kept(value: Any, module: Any) -> Iterator[Any]:
    """Yield the functions, and the methods of the module itself, that a function on the module keeps."""
    selves, seen = (module, source_of(module)), set[int]()
    waiting = deque([value, *(v for k, v in vars(module).items() if k not in _ENTRIES)])
    while waiting and len(seen) < _MOST_KEPT:
        each = waiting.popleft()
        if id(each) in seen or isinstance(each, _NOT_ENTERED):
            continue
        seen.add(id(each))
        if isinstance(each, FunctionType):
            yield each
            waiting += each.__closure__ or ()
        elif isinstance(each, MethodType) and any(each.__self__ is one for one in selves):
            yield each
        else:
            waiting += gc.get_referents(each)


def _names_used(function: Any, cls: Any) -> set[str]:
    """Return the names in a user's method, in functions that it calls, and in methods of its class."""
    used, waiting = set[str](), [function]
    while waiting:
        inner = waiting.pop()
        inner = inspect.unwrap(getattr(inner, "__func__", inner))
        if not isinstance(inner, FunctionType):
            continue
        names, around = _names(inner), inspect.getclosurevars(inner).nonlocals
        called = [around.get(name, inner.__globals__.get(name)) for name in sorted(names)]
        names = names.union(*(_names(each) for each in called if isinstance(each, FunctionType)))
        for name in names - used - _methods(torch_class(cls)):
            owner = next((c for c in cls.__mro__ if name in vars(c)), nn.Module)
            if not owner.__module__.startswith(("torch.", *REPAIRS)):
                waiting.append(vars(owner)[name])
        used |= names
    return used


def _is_torchs(function: Any) -> bool:
    return str(getattr(function, "__module__", "")).startswith(_TORCHS)


def _is_of_repair(function: Any) -> bool:
    return str(getattr(inspect.unwrap(function), "__module__", "")).startswith(REPAIRS)


def _names(function: Any) -> set[str]:
    """Return the names that a method uses; of one that is wrapped by a decorator, those of the method."""
    code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
    return _names_in(code) if code else set()


def _names_in(code: CodeType) -> set[str]:
    """Return the names that code uses, also in functions and comprehensions inside."""
    inner = (_names_in(const) for const in code.co_consts if isinstance(const, CodeType))
    return {*code.co_names, *code.co_freevars}.union(*inner)


def _name_of(value: Any) -> str:
    """Return the module and the qualified name of a function; `functools.wraps` does not hide it."""
    while isinstance(value, MethodType | partial):
        value = value.__func__ if isinstance(value, MethodType) else value.func
    if isinstance(value, FunctionType):
        return f"{value.__globals__.get('__name__')}.{value.__code__.co_qualname}"
    value = value if hasattr(value, "__qualname__") else type(value)
    return f"{value.__module__}.{value.__qualname__}"
