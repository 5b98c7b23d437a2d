"""Walk nested batches: find, name, describe and replace the tensors in them."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Callable, Iterator, Mapping, MutableMapping, ValuesView
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor


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
    described = [
        f"{list(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in tensors_in(value)
    ]
    more = f", and {len(described) - 3} more" if len(described) > 3 else ""
    return ", ".join(described[:3]) + more or type(value).__name__


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in `value`, also in nested lists, tuples, mappings and dataclasses."""
    if isinstance(value, Tensor):
        yield value
        return
    if is_dataclass(value) and not isinstance(value, (type, Mapping)):
        value = [getattr(value, field.name, None) for field in fields(value)]
    items = value.values() if isinstance(value, Mapping) else value
    if isinstance(items, list | tuple | ValuesView):
        for item in items:
            yield from tensors_in(item)


_LEAVES = (str, bytes, bool, int, float, complex, type(None))


def map_tensors(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Return `value` with `change` applied to every tensor in it; the same object if nothing changed.

    Visits mappings, lists, tuples, NamedTuples and dataclasses, and keeps their types. torch's
    pytree does not visit a dataclass or a UserDict that is not registered with it.
    """
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, _LEAVES):
        return value
    if isinstance(value, Mapping):
        return _changed_items(value, {k: map_tensors(change, v) for k, v in value.items()})
    if isinstance(value, list | tuple):
        items = [map_tensors(change, item) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return _like_sequence(value, items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
        return _changed_fields(value, {n: map_tensors(change, getattr(value, n)) for n in names})
    _report_unknown(value)
    return value


def _changed_items(value: Mapping, items: dict) -> Mapping:
    changed = {key: item for key, item in items.items() if item is not value[key]}
    if not changed:
        return value
    if not isinstance(value, MutableMapping):
        mapping: Any = type(value)
        return mapping(items)
    fresh = copy.copy(value)
    for key, item in changed.items():
        fresh[key] = item
    return fresh


def _like_sequence(value: list | tuple, items: list) -> list | tuple:
    if hasattr(value, "_make"):
        return value._make(items)
    if isinstance(value, tuple):
        return type(value)(items)
    fresh = copy.copy(value)
    fresh[:] = items
    return fresh


def _changed_fields(value: Any, fields: dict[str, Any]) -> Any:
    changed = {name: item for name, item in fields.items() if item is not getattr(value, name)}
    if not changed:
        return value
    fresh = copy.copy(value)
    for name, item in changed.items():
        # Not dataclasses.replace: it runs __init__ again, and cannot set every field.
        object.__setattr__(fresh, name, item)
    return fresh


def _report_unknown(value: Any) -> None:
    held = getattr(value, "__dict__", {})
    if isinstance(held, dict) and any(isinstance(item, Tensor) for item in held.values()):
        # All types warn from this line, so Python's filter shows each text once.
        warnings.warn(
            f"the tensors in a {type(value).__qualname__} stay as they are; "
            "give a dict, list, tuple or dataclass",
            stacklevel=2,
        )


def named_tensors_in(value: Any, name: str = "output") -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor in nested lists, tuples, mappings and dataclasses, named `output[0].logits`."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from named_tensors_in(item, f"{name}.{key}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from named_tensors_in(item, f"{name}[{index}]")
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from named_tensors_in(getattr(value, field.name, None), f"{name}.{field.name}")
