"""The audit of a model: the strides, dtype and device of every tensor, judged against a plan."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from prepare.core.utils import files
from prepare.core.utils.json_records import JsonRecord, Kind, Readable
from prepare.core.utils.text import csv_text

if TYPE_CHECKING:
    from torch import nn

    from prepare.pipeline.plan import Plan

# From worst to best; a row has the worst status that applies.
STATUSES = ("ineffective", "skipped", "converted", "already", "untouched")


class AuditRow(NamedTuple):
    """One tensor of one module. Shapes and strides are in elements, dtype and device are names.

    `stride` is exact, `layouts` are all the formats that it satisfies; both, and `shape`, are None or
    empty for a tensor without strides. `before` holds stride, dtype and device before `apply`. `operation` is
    what a convolution runs as, in the row of its weight: `conv3d`, or the name of a rewrite, as `linear`.
    """

    module: str
    type: str
    tensor: str
    kind: str
    shape: tuple[int, ...] | None
    stride: tuple[int, ...] | None
    dtype: str
    device: str
    layouts: tuple[str, ...]
    shared_with: tuple[str, ...]
    before: dict[str, Any] | None
    status: str
    steps: tuple[str, ...]
    reason: str | None
    operation: str = ""

    @property
    def path(self) -> str:
        """The dotted name, as in `state_dict`, with "(computed)" after a computed weight."""
        path = f"{self.module}.{self.tensor}" if self.module else self.tensor
        return f"{path} (computed)" if self.kind == "computed" else path


class Difference(NamedTuple):
    """The differences of one tensor between two audits: `fields` maps a field to (ours, theirs).

    A tensor that only one audit has is `only in ours` or `only in theirs`, without fields.
    """

    tensor: str
    only_in: str | None
    fields: dict[str, tuple[Any, Any]]

    def __str__(self) -> str:
        if self.only_in:
            return f"{self.tensor}: only in {self.only_in}"
        changes = (f"{name} {_word(a)} -> {_word(b)}" for name, (a, b) in self.fields.items())
        return f"{self.tensor}: {', '.join(changes)}"


@dataclass(frozen=True, repr=False)
class Audit(JsonRecord, Readable):
    """The rows of an audit, sorted by name, and a summary of counts."""

    KIND: ClassVar[Kind] = Kind("prepare.audit", "an audit", "an audit.json")
    rows: list[AuditRow]
    summary: dict[str, Any]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write JSON, or CSV if the name ends in .csv; the same model gives the same bytes."""
        files.write_text(path, self.to_csv() if str(path).endswith(".csv") else self.to_json())

    def check(self) -> None:
        """Turn the strides in `before` into tuples again."""
        for before in (row.before for row in self.rows if row.before is not None):
            if before["stride"] is not None:
                before["stride"] = tuple(before["stride"])

    def to_json(self) -> str:
        """Return JSON with one row per line, so that any tool can compare two audits."""
        rows = ",\n".join(_dump(row._asdict()) for row in self.rows)
        head = f'{_dump(self.KIND.head)[1:-1]},"summary":{_dump(self.summary)}'
        return f'{{{head},"rows":[\n{rows}\n]}}\n'

    def to_csv(self) -> str:
        """Return CSV with one line per tensor; lists are separated by spaces, as spreadsheets expect."""
        before = ("stride", "dtype", "device")
        fields = [name for name in AuditRow._fields if name != "before"]
        rows = [[*fields, *(f"before_{name}" for name in before)]]
        for row in self.rows:
            cells = [getattr(row, name) for name in fields]
            cells += [(row.before or {}).get(name) for name in before]
            rows.append([_cell(cell) for cell in cells])
        return csv_text(rows)

    def diff(self, other: Audit) -> list[Difference]:
        """Return every tensor that differs in any field, sorted by name."""
        rows, other_rows = ({row.path: row for row in audit.rows} for audit in (self, other))
        return [
            difference
            for path in sorted({*rows, *other_rows})
            if (difference := _difference(path, rows.get(path), other_rows.get(path)))
        ]


def audit(model: nn.Module, plan: Plan | None = None) -> Audit:
    """Read every parameter, buffer and computed weight of `model`, as they are now.

    With the plan taken before `apply`, each row also has the tensor's earlier state, the steps that
    wanted something of it, and a status. The status follows from the strides, dtypes and devices that
    are read here, never from what a step reports.
    """
    from prepare.audit.read_model import read_model
    from prepare.core.utils.process_state import held_interrupts, paused_collector

    with held_interrupts(), paused_collector():
        return Audit(*read_model(model, plan))


def _difference(path: str, row: AuditRow | None, other: AuditRow | None) -> Difference | None:
    if row is None or other is None:
        return Difference(path, "theirs" if row is None else "ours", {})
    pairs = zip(AuditRow._fields, row, other, strict=True)
    fields = {name: (a, b) for name, a, b in pairs if a != b}
    return Difference(path, None, fields) if fields else None


def _dump(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _word(value: Any) -> str:
    return _dump(value) if isinstance(value, dict | tuple) else str(value)


class _Callable(ModuleType):
    """This package; `prepare.audit(model)` calls the function, which the package of its name would hide."""

    def __call__(self, model: nn.Module, *, plan: Plan | None = None) -> Audit:
        """Audit `model`, as `prepare.audit.audit` does."""
        return audit(model, plan=plan)


sys.modules[__name__].__class__ = _Callable
