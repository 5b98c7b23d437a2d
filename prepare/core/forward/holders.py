"""Read what the objects that a model consists of hold, and write it back: containers, attributes, cells."""

from __future__ import annotations

import random
import sys
from collections import OrderedDict, deque
from contextlib import suppress
from functools import cache, partial
from operator import is_
from types import CellType, FunctionType, MemberDescriptorType, ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# An OrderedDict has an order of its own, which the methods of dict do not keep.
CONTAINERS: tuple[Any, ...] = (OrderedDict, dict, list, set, deque)
SIMPLE = frozenset({bool, int, float, complex, str, bytes, type(None), range, torch.Size})
SIMPLE |= {torch.dtype, torch.device, torch.layout, torch.memory_format}
_FOREIGN = frozenset({"torch", "prepare", *sys.stdlib_module_names})
_HEAP_TYPE = 1 << 9  # the bit of `__flags__` of a class that is made by a class statement

# The name of a module, and of its tensor or attribute.
Place = tuple[str, str]
_Content = tuple[list[Any], list[Any]]


class Holder(NamedTuple):
    """An object that holds others, with functions that read and write them, and what it held."""

    owner: Any
    place: Place
    read: Callable[[Any], _Content]
    write: Callable[[Any, list[Any], list[Any]], object]
    keys: list[Any]
    values: list[Any]

    def replace(self, change: Callable[[Any], Any]) -> None:
        """Hold `change(value)` in place of each value."""
        if not self.values:
            return
        values = [value if type(value) in SIMPLE else change(value) for value in self.values]
        if not all(map(is_, values, self.values)):
            self.write(self.owner, self.keys, values)

    def restore(self) -> list[str] | None:
        """Hold again what was held; return the names that held anything else, None if there is no change."""
        keys, values = self.read(self.owner)
        same_number = len(keys) == len(self.keys) and len(values) == len(self.values)
        if same_number and all(map(is_, keys, self.keys)) and all(map(is_, values, self.values)):
            return None
        self.write(self.owner, self.keys, self.values)
        now, before = _by_name(keys, values), _by_name(self.keys, self.values)
        return [
            key for key in {**before, **now} if key not in before or now.get(key) is not before[key]
        ]


def _by_name(keys: list[Any], values: list[Any]) -> dict[str, Any]:
    pairs = zip(keys, values, strict=False)  # the values of a list have no keys
    return {key: value for key, value in pairs if isinstance(key, str) and key != "__class__"}


@cache
def _base(kind: type) -> Any:
    """Return the class whose methods read and write a container; a subclass may have others."""
    return next(base for base in CONTAINERS if issubclass(kind, base))


def _contained(container: Any) -> _Content:
    base = _base(type(container))  # type: ignore[arg-type]
    keys = list(base.__iter__(container))
    return (keys, list(base.values(container))) if issubclass(base, dict) else ([], keys)


def _fill(container: Any, keys: list[Any], values: list[Any]) -> None:
    base = _base(type(container))  # type: ignore[arg-type]
    base.clear(container)
    if issubclass(base, dict):
        for key, value in zip(keys, values, strict=True):
            base.__setitem__(container, key, value)
    else:
        (base.update if base is set else base.extend)(container, values)


def _attributes(owner: Any) -> _Content:
    """Return the class of an object, its slots, and its attributes."""
    keys, values = ["__class__"], [type(owner)]
    for slot in _slots(type(owner)):  # type: ignore[arg-type]
        with suppress(AttributeError):  # the slot has no value
            values.append(slot.__get__(owner))
            keys.append(slot)
    own = _dict_of(owner)
    return [*keys, *own], [*values, *own.values()]


def _set_attributes(owner: Any, keys: list[Any], values: list[Any]) -> None:
    if type(owner) is not values[0]:
        object.__setattr__(owner, "__class__", values[0])
    own = _dict_of(owner)
    own.clear()
    for key, value in zip(keys[1:], values[1:], strict=True):
        if isinstance(key, MemberDescriptorType):
            key.__set__(owner, value)
        else:
            own[key] = value


def _dict_of(owner: Any) -> dict[str, Any]:
    try:
        return object.__getattribute__(owner, "__dict__")
    except AttributeError:
        return {}


@cache
def _slots(kind: Any) -> tuple[Any, ...]:
    heap = [cls for cls in kind.__mro__ if cls.__flags__ & _HEAP_TYPE]
    members = (value for cls in heap for value in vars(cls).values())
    return tuple(value for value in members if isinstance(value, MemberDescriptorType))


def _class_data(cls: type) -> _Content:
    """Return the data among the attributes of a class."""
    entries = {
        key: value
        for key, value in vars(cls).items()
        if not (key.startswith("__") or callable(value) or hasattr(type(value), "__get__"))
    }
    return list(entries), list(entries.values())


def _set_class_data(cls: type, keys: list[Any], values: list[Any]) -> None:
    for key in {*_class_data(cls)[0]} - {*keys}:
        type.__delattr__(cls, key)
    for key, value in zip(keys, values, strict=True):
        type.__setattr__(cls, key, value)


def _cell_content(cell: CellType) -> _Content:
    try:
        return [], [cell.cell_contents]
    except ValueError:  # nothing is assigned yet
        return [], []


def _set_cell(cell: CellType, _: list[Any], values: list[Any]) -> None:
    if values:
        cell.cell_contents = values[0]
    else:
        del cell.cell_contents


def _named_globals(function: FunctionType) -> _Content:
    """Return the data among the global variables that a function names."""
    names = [name for name in function.__code__.co_names if name in function.__globals__]
    values = {name: function.__globals__[name] for name in names}
    kinds = (FunctionType, type, ModuleType)
    values = {name: value for name, value in values.items() if not isinstance(value, kinds)}
    return list(values), list(values.values())


def _set_globals(function: FunctionType, keys: list[Any], values: list[Any]) -> None:
    function.__globals__.update(zip(keys, values, strict=True))


@cache
def is_foreign(module: str | None) -> bool:
    return str(module).partition(".")[0] in _FOREIGN


@cache
def is_entered(kind: Any) -> bool:
    """Return whether objects of a class may be a part of a model: not those of torch and of Python."""
    if kind is SimpleNamespace:
        return True
    is_object = kind.__flags__ & _HEAP_TYPE and not issubclass(kind, type | ModuleType)
    return bool(is_object) and not is_foreign(kind.__module__)


def reset_of(value: Any) -> Callable[[], object] | None:
    """Return a function that sets a random generator or an array back; None for anything else."""
    if isinstance(value, torch.Generator):
        state = value.get_state()
        return lambda: value.set_state(state) and None
    if isinstance(value, random.Random):
        return partial(value.setstate, value.getstate())
    if (numpy := sys.modules.get("numpy")) is None:
        return None
    if isinstance(value, numpy.ndarray):
        return partial(_reset_array, value, value.copy())
    if isinstance(value, numpy.random.RandomState):
        return partial(value.set_state, value.get_state())
    if isinstance(value, numpy.random.Generator):
        return partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    return None


def _reset_array(array: Any, values: Any) -> bool:
    differs = array.tobytes() != values.tobytes()
    if differs:
        array[...] = values
    return bool(differs)


def scripted(
    module: torch.jit.ScriptModule,
) -> Iterator[tuple[str, Any, Callable[[], object]]]:
    """Yield each attribute of a scripted module, with its value and a function that sets it back."""
    kind = getattr(module, "_concrete_type", None)
    for name in kind.get_attributes() if kind else ():
        value = getattr(module, name)
        yield name, value, partial(setattr, module, name, value)


# How each kind of object is read and written.
CONTAINER = _contained, _fill
OBJECT = _attributes, _set_attributes
CLASS = _class_data, _set_class_data
CELL = _cell_content, _set_cell
GLOBALS = _named_globals, _set_globals


def access_of(value: Any) -> Any:
    """Return how a container, or an object that may be part of a model, is read and written; else None."""
    if isinstance(value, CONTAINERS):
        return CONTAINER
    return OBJECT if is_entered(type(value)) else None  # type: ignore[arg-type]
