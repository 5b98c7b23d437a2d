"""Tell which code a call of a module runs: torch's, that of a user's class, or a function on the instance."""

from __future__ import annotations

import dis
import inspect
from dataclasses import dataclass
from functools import cache, partial
from types import CodeType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn import functional as F  # noqa: N812

from prepare.core.model.module_kinds import REPAIRS, is_repair
from prepare.core.model.module_tree import source_of
from prepare.core.model.replaced_method import ReplacedMethod, foreign_method

if TYPE_CHECKING:
    from collections.abc import Iterator

# The methods with which a call may begin, outermost first.
_ENTRIES = ("__call__", "_call_impl", "forward")
_TORCHS = ("torch.nn.modules.", *REPAIRS)


@dataclass(frozen=True)
class ForwardCode:
    """The code that a call of a module runs, as far as its methods show.

    Attributes:
        torchs: the class in `torch.nn` from which the class of the module is derived; None if that is
            `nn.Module` alone.
        through: the methods of `torchs` that run and are found by the class of the module, so that a
            subclass which overrides one of them takes effect. Empty if other code does the same work too.
        alone: whether only code of `torchs` runs, or of a repair of it.
        runs_torchs: whether the work of `torchs` is done by its own method, or by other code which calls
            the same function, as `F.instance_norm`; also True for a function on the instance, whose work is
            not known.
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
    return (
        _code_of(cls)
        if vars(module).keys().isdisjoint(_methods(cls))
        else _Search(cls, module).code()
    )


def replaced_by(module: nn.Module, method: str = "forward") -> str:
    """Return the function that stands on the instance in place of a method; empty if there is none."""
    value = foreign_method(module, method)
    return "" if value is None else _name_of(value)


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
    functions = ((n, inspect.unwrap(getattr(repair, n))) for n in _methods(repair))
    methods = frozenset(n for n, function in functions if function.__module__.startswith(REPAIRS))
    return methods - {"forward"} or methods


@cache
def _methods(cls: Any) -> frozenset[str]:
    """Return the methods that decide on the result of a call: `forward`, and those that it calls."""
    torchs, reached, waiting = torch_class(cls), set(_ENTRIES), ["forward"]
    while torchs and waiting:
        for name in _names(getattr(torchs, waiting.pop())) - reached:
            function = getattr(torchs, name, None)
            is_check = name.startswith("_check")  # a check returns nothing
            if isinstance(function, FunctionType) and name not in vars(nn.Module) and not is_check:
                reached.add(name)
                waiting.append(name)
    return frozenset(reached)


@cache
def _kernels(cls: Any) -> frozenset[str]:
    """Return the functions of torch that do the work of `cls`; each norm can do the work of another."""
    torchs, methods = torch_class(cls), _methods(cls) - {*_ENTRIES[:-1]}
    used = {name for method in methods for name in _names(getattr(torchs, method, None))}
    names = {n for n in used if n[0] != "_" and inspect.isroutine(vars(F).get(n))}
    names -= {"has_torch_function"}
    names = names - {"pad"} or names  # the work of a pad, but only a help for a convolution
    if any(name.endswith("_norm") for name in names):
        names.update(name for name in vars(F) if name.endswith("_norm"))
    return frozenset(names) if torchs else frozenset()


class _Search:
    """Follows a call from method to method."""

    def __init__(self, cls: Any, module: nn.Module | None = None) -> None:
        self.cls, self.module = cls, module
        self.selves = [] if module is None else [module, source_of(module)]
        self.on_instance = {} if module is None else vars(module)
        self.through: set[str] = set()
        self.alone, self.works, self.calls_kernel = True, False, False
        self.replaced: list[str] = []
        self.seen: set[Any] = set()

    def code(self) -> ForwardCode:
        torchs = torch_class(self.cls)
        starts = (
            n for n in _ENTRIES if n in self.on_instance or not _is_torchs(_owner(self.cls, n), n)
        )
        self._look_up(next(starts, "forward"))
        runs_torchs = self.works or self.calls_kernel or bool(self.replaced)
        repairs = [c for c in self.cls.__mro__ if is_repair(c)]
        through = frozenset() if self.calls_kernel else frozenset(self.through)
        alone = self.alone and torchs is not None
        repaired = bool(repairs) and not _overridden(repairs[-1]).isdisjoint(through)
        replaced = ", ".join(self.replaced)
        return ForwardCode(torchs, through, alone, runs_torchs, repaired, replaced)

    def _look_up(self, name: str) -> None:
        """Follow `self.name`."""
        if name in self.seen:
            return
        self.seen.add(name)
        if name in self.on_instance:
            self.alone = False
            if not isinstance(value := self.on_instance[name], ReplacedMethod):
                self.replaced.append(_name_of(value))
            self._follow_value(value)
        else:
            self._follow_class(name, self.cls.__mro__)

    def _follow_class(self, name: str, classes: tuple[Any, ...]) -> None:
        """Follow the first method of this name in `classes`."""
        owner = next((c for c in classes if name in vars(c)), nn.Module)
        if owner is nn.Module:
            if name in _ENTRIES[:-1]:
                self._look_up("forward")
        elif _is_torchs(owner, name):
            self.through.add(name)
            self._follow_torchs(vars(owner)[name])
        else:
            self.works |= owner.__module__.startswith(
                _TORCHS
            )  # a method that another program has put there
            self._follow_users(vars(owner)[name], name, owner)

    def _follow_torchs(self, function: Any) -> None:
        is_repair = inspect.unwrap(function).__module__.startswith(REPAIRS)
        self.works |= is_repair or not _names(function).isdisjoint(_kernels(self.cls))
        for name in sorted(_names(function) & _methods(self.cls)):
            self._look_up(name)

    def _follow_users(self, function: Any, name: str, owner: Any) -> None:
        """Follow a method of a user's class: what it calls by `super()`, by a class's name, and on `self`."""
        self.alone = False
        if isinstance(function, staticmethod):
            function = function.__func__
        if not isinstance(inspect.unwrap(function), FunctionType):
            self.works = True  # what runs cannot be seen, as in a partial method: it may be torch's
            return
        names, mro, held = _names(function), self.cls.__mro__, _named(function)
        helpers = [v for v in held if isinstance(v, FunctionType)]
        used = names.union(*map(_names, helpers))
        self.calls_kernel |= not used.isdisjoint(_kernels(self.cls))
        called = {name} if name in _methods(self.cls) else {*_ENTRIES}
        if "super" in names:
            for each in sorted(called & names):
                self._follow_class(each, mro[mro.index(owner) + 1 :])
            self.works |= "getattr" in names
        elif name in names:
            bases = [c for c in mro if c.__name__ in names or c in held]
            self._follow_bases(name, [c for c in bases if issubclass(owner, c) and c is not owner])
        for helper in helpers:
            if not self._follow_function(helper) and helper.__name__ == name:
                # A method that stood in the place of this one: of torch, or of a decorator without `wraps`.
                self.works |= helper.__module__.startswith(_TORCHS)
                self._follow_users(helper, name, owner)
        for other in sorted(names & _methods(self.cls) - {name}):
            if other not in _ENTRIES or name in _ENTRIES[:-1]:
                self._look_up(other)
        for other in sorted(names - _methods(self.cls) - self.seen):
            if (place := _owner_of_users(self.cls, other)) is not None:
                self.seen.add(other)
                self._follow_users(vars(place)[other], other, place)

    def _follow_bases(self, name: str, bases: list[Any]) -> None:
        """Follow a method that is called by the name of a class."""
        for base in bases:
            if getattr(base, name) is getattr(nn.Module, name, None):
                self._look_up("forward")
            self._follow_function(getattr(base, name))
        self.works |= not bases  # code that is not seen: it may be torch's

    def _follow_value(self, value: Any, depth: int = 6) -> None:
        """Follow a function on the instance to the methods of the module that it holds and uses."""
        if not depth or id(value) in self.seen:
            return
        self.seen.add(id(value))
        if isinstance(value, ReplacedMethod):  # the method of its class, with some calls replaced
            if value.__self__ in self.selves:
                owner = _owner(self.cls, value.__name__)
                self._follow_users(value.__func__, value.__name__, owner)
            return
        given: tuple[Any, ...] = ()
        while isinstance(value, MethodType | partial):
            if isinstance(value, partial):
                value, given = value.func, (*value.args, *given, *value.keywords.values())
            elif value.__self__ in self.selves and self._follow_function(value.__func__):
                return
            elif isinstance(value.__self__, nn.Module) and value.__self__ not in self.selves:
                return  # a method of another module
            else:
                value, given = value.__func__, (value.__self__, *given)
        if not isinstance(value, FunctionType):
            return
        self.calls_kernel |= not _names_in(value.__code__).isdisjoint(_kernels(self.cls))
        for held in _held(value, given):
            if callable(held) and not isinstance(held, nn.Module | type):
                self._follow_value(held, depth - 1)

    def _follow_function(self, function: Any) -> bool:
        """Follow a function that is bound to the module; return whether it is one of its class."""
        name = function.__name__
        if function.__module__.startswith(REPAIRS):
            self._follow_class(name, self.cls.__mro__)  # a repair looks for the present class
            return True
        owner = next((c for c in self.cls.__mro__ if vars(c).get(name) is function), None)
        if owner is None or name not in _methods(self.cls):
            return False
        if _is_torchs(owner, name):
            self._follow_torchs(function)
        else:
            self._follow_users(function, name, owner)
        return True


def _held(function: FunctionType, given: tuple[Any, ...]) -> Iterator[Any]:
    """Yield the values that a function uses: given arguments, free variables, and attributes of both."""
    code = function.__code__
    used = {n for i in dis.get_instructions(code) for n in _flat(i.argval)} | set(code.co_freevars)
    named = dict(zip(code.co_varnames, given, strict=False))
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            named[name] = cell.cell_contents
        except ValueError:  # the variable is not assigned yet
            continue
    for name in sorted(named.keys() & used):
        value = named[name]
        yield value
        attributes = {} if callable(value) else getattr(value, "__dict__", {})
        if isinstance(value, nn.Module):
            attributes = {k: v for k, v in vars(value).items() if k not in _ENTRIES}
        yield from (attributes[attribute] for attribute in sorted(attributes.keys() & used))


def _named(function: Any) -> list[Any]:
    """Return the classes and functions that a method names, in its file and around it, and its defaults."""
    inner = inspect.unwrap(function)
    if not isinstance(inner, FunctionType):
        return []
    names, around = _names(inner), inspect.getclosurevars(inner).nonlocals
    scope = {**inner.__globals__, **around}
    given = (*(inner.__defaults__ or ()), *(inner.__kwdefaults__ or {}).values())
    referred = (*map(scope.get, sorted(names)), *given)
    return [each for each in referred if isinstance(each, FunctionType | type)]


def _owner_of_users(cls: Any, name: str) -> Any:
    """Return the user's class that defines a method, also a static one; None if there is none."""
    owner = next((c for c in cls.__mro__ if name in vars(c)), object)
    is_method = isinstance(vars(owner).get(name), FunctionType | staticmethod)
    return owner if is_method and not owner.__module__.startswith(("torch.", *REPAIRS)) else None


def _flat(argval: Any) -> tuple[Any, ...]:
    return argval if isinstance(argval, tuple) else (argval,) if isinstance(argval, str) else ()


def _owner(cls: Any, name: str) -> Any:
    return next(c for c in cls.__mro__ if name in vars(c))


def _is_torchs(owner: Any, name: str) -> bool:
    """Return whether a method is torch's, or of a repair, which computes the same."""
    # Another step may put a user's method into a class that is made of a repair.
    function = vars(owner).get(name)
    return all(
        getattr(each, "__module__", "").startswith(_TORCHS) for each in (owner, function or owner)
    )


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
