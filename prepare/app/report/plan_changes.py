"""The table of the tensors that a plan would change."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from prepare.core.document import Table, columns

# The request that changes a side of a tensor, where their names differ.
_WANTS = {"stride": "memory_format"}


def changes_table(tensors: Iterable[Mapping[str, Any]]) -> Table:
    """Return the tensors of a `plan.json` that a plan would change, and how."""
    rows = []
    for tensor in tensors:
        old, new = tensor["old"], tensor["new"]
        if sides := [side for side in old if old[side] != new[side]]:
            name = ".".join(filter(None, (tensor["module"], tensor["tensor"])))
            shape = tensor["shape"]
            changes = [_change(side, shape, old[side], new[side]) for side in sides]
            by = [tensor["by"].get(_WANTS.get(side, side), ()) for side in sides]
            steps = dict.fromkeys(step for names in by for step in names)
            rows.append((name, _value(shape), changes, list(steps)))
    titles = columns("tensor name, shape text, change text, wanted by text")
    return Table(label="Changes", columns=titles, rows=rows, noun="tensor", file="plan.json")


def _change(side: str, shape: Sequence[int], old: Any, new: Any) -> str:
    """Return one change; memory formats are named instead of strides if these differ."""
    from prepare.core.model.memory_format import satisfied

    if side == "stride" and old is not None and new is not None:
        formats = [satisfied(tuple(shape), tuple(strides)) for strides in (old, new)]
        names = [" or ".join(found) or "no format" for found in formats]
        if names[0] != names[1]:
            return " -> ".join(names)
        return f"strides {_value(old)} -> {_value(new)}"
    return f"{_value(old)} -> {_value(new)}"


def _value(value: Any) -> str:
    return str(list(value)) if isinstance(value, tuple) else str(value)
