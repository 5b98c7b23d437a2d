"""The long tables of a run's page: every tensor, every place of the flow, every convolution."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from prepare.audit.rows import STATUSES, Row
from prepare.core.utils.text import size
from prepare.report.pages.long_table import Grid, grid

if TYPE_CHECKING:
    from prepare.flow.records import Flow

# What is not in any module of its own.
_WHOLE = "the model itself"


def tensor_table(found: Iterable[Row]) -> Grid:
    """What became of every tensor of every module, the worst first."""
    columns = [("Tensor", "name"), ("Module", "text"), ("Status", "word"), ("Shape", "number")]
    columns += [("Strides", "number"), ("Type", "text"), ("Device", "text")]
    columns += [("Strides before", "number"), ("Before", "text"), ("Reason", "prose")]
    return grid(columns, map(_tensor, sorted(found, key=_worst_first)), "audit.csv")


def event_table(flow: Flow) -> Grid:
    """Where the layout is lost and regained."""
    columns = [("What", "word"), ("In", "text"), ("Module", "name"), ("Type", "text")]
    columns += [("Operation", "code"), ("Cause", "text"), ("Times", "number"), ("Output", "number")]
    columns += [("Shape", "number"), ("Operands", "prose"), ("Called at", "text")]
    words = {"break": "lost", "regain": "regained"}
    rows = (
        (
            *(words.get(e.kind, e.kind), e.phase, e.module or _WHOLE, e.type, e.operation, e.cause),
            *(f"{e.count:,}", size(e.bytes), e.shape, e.operand, e.source),
        )
        for e in flow.events
    )
    return grid(columns, rows, "flow.json")


def copy_table(flow: Flow) -> Grid:
    """What is copied because of layouts, the largest first."""
    columns = [("Module", "name"), ("Type", "text"), ("Operation", "code"), ("Times", "number")]
    columns += [("Bytes", "number"), ("Why", "prose"), ("In", "text")]
    rows = (
        (c.module or _WHOLE, c.type, c.operation, f"{c.count:,}", size(c.bytes), c.why, c.phase)
        for c in sorted(flow.copies, key=lambda copy: -copy.bytes)
    )
    return grid(columns, rows, "flow.json")


def convolution_table(flow: Flow) -> Grid:
    """The layouts around each convolution, and what ran it."""
    columns = [("Module", "name"), ("Type", "text"), ("Input", "text"), ("Weight", "text")]
    columns += [("Output", "text"), ("Kernel", "text"), ("Calls", "number")]
    rows = (
        (c.module or _WHOLE, c.type, c.input, c.weight, c.output, c.backend, f"{c.calls:,}")
        for c in flow.convolutions
    )
    return grid(columns, rows, "flow.json")


def _tensor(row: Row) -> tuple[Any, ...]:
    before = row.before or {}
    was = ", ".join(str(before[key]) for key in ("dtype", "device") if key in before)
    now = (row.path, row.type, row.status, row.shape, row.stride, row.dtype, row.device)
    return (*now, before.get("stride"), was, row.reason)


def _worst_first(row: Row) -> int:
    return STATUSES.index(row.status)
