"""The long tables of a job's page: tensors, layout breaks, copies and convolutions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from prepare.audit.rows import STATUSES, AuditRow
from prepare.core.utils.text import size
from prepare.report.pages.long_table import LongTable, long_table

if TYPE_CHECKING:
    from prepare.flow.records import Flow

# Named for operators outside all submodules.
_ROOT = "the model itself"


def tensor_table(rows: Iterable[AuditRow]) -> LongTable:
    """Return every tensor of every module with its status, the worst first."""
    columns = [("Tensor", "name"), ("Module", "text"), ("Status", "word"), ("Shape", "number")]
    columns += [("Strides", "number"), ("Type", "text"), ("Device", "text")]
    columns += [("Strides before", "number"), ("Before", "text"), ("Reason", "prose")]
    return long_table(columns, map(_tensor, sorted(rows, key=_worst_first)), "audit.csv")


def event_table(flow: Flow) -> LongTable:
    """Return the places where the layout is lost or regained."""
    columns = [("Event", "word"), ("Phase", "text"), ("Module", "name"), ("Type", "text")]
    columns += [("Operation", "code"), ("Cause", "text"), ("Times", "number"), ("Output", "number")]
    columns += [("Shape", "number"), ("Operands", "prose"), ("Called at", "text")]
    kinds = {"break": "lost", "regain": "regained"}
    rows = (
        (
            *(kinds.get(e.kind, e.kind), e.phase, e.module or _ROOT, e.type, e.operation, e.cause),
            *(f"{e.count:,}", size(e.bytes), e.shape, e.operand, e.source),
        )
        for e in flow.events
    )
    return long_table(columns, rows, "flow.json")


def copy_table(flow: Flow) -> LongTable:
    """Return the copies because of layouts, the largest first."""
    columns = [("Module", "name"), ("Type", "text"), ("Operation", "code"), ("Times", "number")]
    columns += [("Bytes", "number"), ("Cause", "prose"), ("Phase", "text")]
    rows = (
        (c.module or _ROOT, c.type, c.operation, f"{c.count:,}", size(c.bytes), c.why, c.phase)
        for c in sorted(flow.copies, key=lambda copy: -copy.bytes)
    )
    return long_table(columns, rows, "flow.json")


def convolution_table(flow: Flow) -> LongTable:
    """Return the layouts around each convolution, and its kernel."""
    columns = [("Module", "name"), ("Type", "text"), ("Input", "text"), ("Weight", "text")]
    columns += [("Output", "text"), ("Kernel", "text"), ("Calls", "number")]
    rows = (
        (c.module or _ROOT, c.type, c.input, c.weight, c.output, c.backend, f"{c.calls:,}")
        for c in flow.convolutions
    )
    return long_table(columns, rows, "flow.json")


def _tensor(row: AuditRow) -> tuple[Any, ...]:
    before = row.before or {}
    types = ", ".join(str(before[key]) for key in ("dtype", "device") if key in before)
    after = (row.path, row.type, row.status, row.shape, row.stride, row.dtype, row.device)
    return (*after, before.get("stride"), types, row.reason)


def _worst_first(row: AuditRow) -> int:
    return STATUSES.index(row.status)
