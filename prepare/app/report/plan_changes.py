"""The table of the tensors that a plan would change."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from prepare.core.document import Table


def changes_table(tensors: Iterable[Any]) -> Table:
    """Return the tensors that a plan would change, and how."""
    rows = [
        (
            f"{plan.module}.{plan.tensor}" if plan.module else plan.tensor,
            str(list(plan.shape)),
            list(_changes(plan)),
            list(plan.changing),
        )
        for plan in tensors
        if plan.changes
    ]
    columns = (("tensor", "name"), ("shape", "text"), ("change", "text"), ("wanted by", "text"))
    return Table(label="Changes", columns=columns, rows=rows, noun="tensor", file="plan.json")


def _changes(plan: Any) -> Iterable[str]:
    """Yield each change of a tensor; memory formats are named instead of strides if these differ."""
    from prepare.core.model.memory_format import satisfied

    for side, old, new in zip(plan.old._fields, plan.old, plan.new, strict=True):
        texts = [_value(old), _value(new)]
        if side == "stride" and old is not None and new is not None:
            names = [" or ".join(satisfied(plan.shape, s)) or "no format" for s in (old, new)]
            texts = names if names[0] != names[1] else [f"strides {texts[0]}", texts[1]]
        if old != new:
            yield " -> ".join(texts)


def _value(value: Any) -> str:
    return str(list(value)) if isinstance(value, tuple) else str(value)
