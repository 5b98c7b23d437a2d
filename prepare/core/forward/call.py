"""The arguments of one call of a model, the tensors in nested batches, and views that call another method."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from prepare.core.model.module_kinds import make_class
from prepare.core.model.tensors import name_of
from prepare.core.utils.suggest import choose
from prepare.errors import ConfigError

_NUMBERS = (int, float, complex, torch.SymBool, torch.SymInt, torch.SymFloat)
_LEAVES = (str, bytes, *_NUMBERS, type(None))


@dataclass(frozen=True)
class Call:
    """`model(*args, **kwargs)`."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def map(self, change: Callable[[Tensor], Tensor]) -> Call:
        """Return the call with `change` applied to every tensor, at any depth."""
        return Call(map_tensors(change, self.args), map_tensors(change, self.kwargs))

    def tensors(self) -> list[Tensor]:
        """Return every tensor, in order."""
        return list(tensors_in([*self.args, *self.kwargs.values()]))

    @property
    def batch(self) -> int | None:
        """Return the size of the first dimension of the first tensor with dimensions; None without one."""
        return next((len(tensor) for tensor in self.tensors() if tensor.dim()), None)


def call_of(batch: Any) -> Call:
    """Convert a tensor, a tuple of positional or a mapping of named arguments, or an Example to a call."""
    return Call(*arguments(batch))


def arguments(batch: Any) -> tuple[tuple, dict[str, Any]]:
    """Split a batch into positional and keyword arguments: a tuple holds the first, a mapping the second."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    if isinstance(batch, tuple | list):
        return tuple(batch), {}
    if hasattr(batch, "args") and hasattr(batch, "kwargs"):  # an Example, or a Call
        return tuple(batch.args), dict(batch.kwargs)
    return (batch,), {}


def describe(value: Any) -> str:
    """Describe the tensors in `value`, separated by commas: `[2, 1, 32, 32] float32`."""
    described = [f"{list(each.shape)} {name_of(each.dtype)}" for each in tensors_in(value)]
    more = f", and {len(described) - 3} more" if len(described) > 3 else ""
    return ", ".join(described[:3]) + more or type(value).__name__


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in `value`, also in nested lists, tuples, mappings and dataclasses."""
    return (tensor for _, tensor in placed(value))


def placed(value: Any, place: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in `value` as `tensors_in` does, with their places: `0.boxes`."""
    if isinstance(value, Tensor):
        yield place, value
    for key, item in items_of(value):
        yield from placed(item, f"{place}.{key}" if place else str(key))


def map_tensors(change: Callable[[Tensor], Any], value: Any) -> Any:
    """Return `value` with `change` applied to every tensor in it; the same object if nothing changed.

    Visits mappings, lists, tuples, NamedTuples and dataclasses, and keeps their types. torch's
    pytree does not visit a dataclass, a UserDict or a subclass of dict that is not registered with it.
    """
    return map_named(lambda tensor, _: change(tensor), value)


def map_named(change: Callable[[Tensor, str], Any], value: Any, name: str = "") -> Any:
    """Return what `map_tensors` returns; `change` gets the name of each tensor too: `targets.0.boxes`."""
    if isinstance(value, Tensor):
        return change(value, name)
    if isinstance(value, _LEAVES):
        return value
    start = f"{name}." if name else ""
    if torch.compiler.is_compiling():  # which cannot trace a comparison of containers
        if type(value) is dict:
            return {k: map_named(change, v, f"{start}{k}") for k, v in value.items()}
        if type(value) in (list, tuple):
            items = [map_named(change, v, f"{start}{i}") for i, v in enumerate(value)]
            return type(value)(items)
    before = dict(items_of(value))
    after = {key: map_named(change, v, f"{start}{key}") for key, v in before.items()}
    changed = {key: item for key, item in after.items() if item is not before[key]}
    if not before:
        _report_unknown(value)
    return _replaced(value, after, changed) if changed else value


def items_of(value: Any) -> Iterable[tuple[Any, Any]]:
    """Return the items of a container with their keys, indices or fields; nothing for another value."""
    if isinstance(value, Mapping):
        return value.items()
    if isinstance(value, list | tuple):
        return enumerate(value)
    if is_dataclass(value) and not isinstance(value, type):
        names = (field.name for field in fields(value))
        return ((name, getattr(value, name)) for name in names if hasattr(value, name))
    return ()


def _replaced(value: Any, items: dict[Any, Any], changed: dict[Any, Any]) -> Any:
    """Return a container like `value` that holds `items`, of which only some have `changed`."""
    kind: Any = type(value)
    if isinstance(value, tuple):
        return getattr(kind, "_make", kind)(items.values())
    if isinstance(value, Mapping) and not isinstance(value, MutableMapping):
        return kind(items)
    fresh = copy.copy(value)
    for key, item in changed.items():
        if isinstance(fresh, list | MutableMapping):
            fresh[key] = item
        else:  # not dataclasses.replace: it runs __init__ again, and cannot set every field
            object.__setattr__(fresh, key, item)
    return fresh


def _report_unknown(value: Any) -> None:
    """Warn once for each class of a value, which is no container, that has tensors in its attributes."""
    held = getattr(value, "__dict__", {})
    if isinstance(held, dict) and any(isinstance(item, Tensor) for item in held.values()):
        # All classes warn from this line, so Python's filter shows each text once.
        text = f"the tensors in a {type(value).__qualname__} stay as they are"
        warnings.warn(f"{text}; give a dict, list, tuple or dataclass", stacklevel=2)


def calling(model: nn.Module, method: str) -> nn.Module:
    """Return a view of `model` whose call runs `method`: `calling(vae, "decode")(latents)`.

    It shares everything with the model (modules, tensors, hooks), and every name in it is the model's.
    Prepare the model itself; then predict, verify, time or export a view of it.

    Raises:
        ConfigError: the model's class has no such method; the error names the nearest ones.
    """
    kind: Any = type(model)  # a class is hashable, which mypy denies
    view: nn.Module = object.__new__(class_calling(kind, method))
    # What steps have put there for forward.
    own = ("forward", "_compiled_call_impl")
    vars(view).update((key, value) for key, value in vars(model).items() if key not in own)
    return view


@cache
def class_calling(cls: Any, method: str) -> Any:
    """Return a subclass of `cls` with its name, whose `forward` is `method`; the same class each time.

    Raises:
        ConfigError: `cls` has no such method; the error names the nearest ones.
    """
    if method == "forward":
        return cls
    if not inspect.isfunction(getattr(cls, str(method), None)):
        names = sorted({*dir(cls)} - {*dir(nn.Module)} | {"forward"})
        methods = [n for n in names if n[0] != "_" and inspect.isfunction(getattr(cls, n))]
        wrong = f"{cls.__name__} has no method {str(method)!r}"
        raise ConfigError("model.method", wrong, choose(method, methods, noun="methods"))

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # Looked up by its name: a step may replace the method.
        return getattr(self, method)(*args, **kwargs)

    forward.__signature__ = inspect.signature(getattr(cls, method))  # type: ignore[attr-defined]
    members = {"forward": forward, "__module__": cls.__module__, "__doc__": cls.__doc__}
    members["__qualname__"] = cls.__qualname__
    return make_class(cls.__name__, (cls,), members, class_calling, cls, method)
