"""The per-module stride table of a model: what each tensor is, judged against a plan, trusting no step."""

from __future__ import annotations

import csv
import io
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from prepare import files
from prepare.errors import AuditError
from prepare.layout import canonical_stride, satisfied, takes

if TYPE_CHECKING:
    from torch import Tensor, nn

    from prepare.plan import Plan, TensorPlan
    from prepare.tensors import NamedTensor

# From the worst to the best; a row bears the worst that holds.
STATUSES = ("ineffective", "skipped", "converted", "already", "untouched")
FORMAT, VERSION = "prepare.audit", 1


class Row(NamedTuple):
    """One tensor of one module. Shapes and strides are in elements, dtype and device are names.

    `stride` is exact, `layouts` are all the formats it satisfies; both, and `shape`, are None or
    empty for a tensor that has no strides. `before` holds stride, dtype and device before `apply`.
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

    @property
    def path(self) -> str:
        """The dotted name, as in `state_dict`; a computed weight is marked so."""
        path = f"{self.module}.{self.tensor}" if self.module else self.tensor
        return f"{path} (computed)" if self.kind == "computed" else path


class Difference(NamedTuple):
    """What differs about one tensor between two audits: `fields` maps a field to (ours, theirs).

    A tensor that only one of them has is `only in ours` or `only in theirs`, without fields.
    """

    tensor: str
    only_in: str | None
    fields: dict[str, tuple[Any, Any]]

    def __str__(self) -> str:
        if self.only_in:
            return f"{self.tensor}: only in {self.only_in}"
        changes = (f"{name} {_word(a)} -> {_word(b)}" for name, (a, b) in self.fields.items())
        return f"{self.tensor}: {', '.join(changes)}"


@dataclass(frozen=True)
class Audit:
    """The table, sorted by name, and what it adds up to."""

    rows: list[Row]
    summary: dict[str, Any]

    def save(self, path: str | Path) -> None:
        """Writes JSON, or CSV where the name ends in .csv; the same model gives the same bytes."""
        files.write_text(path, self.to_csv() if str(path).endswith(".csv") else self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> Audit:
        """An audit from its JSON.

        Raises:
            AuditError: the file is no audit, or one of another version.
        """
        text = files.read_text(path)
        try:
            data = json.loads(text)
            if data["format"] != FORMAT:
                raise AuditError(str(path), f"this is a {data['format']}, not a {FORMAT}")
            if data["version"] != VERSION:
                wrong = f"version {data['version']!r} is not known here"
                raise AuditError(str(path), wrong, f"this prepare reads version {VERSION}")
            return cls([_row(row) for row in data["rows"]], data["summary"])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            wrong = f"this is no audit: {type(error).__name__}: {error}"
            raise AuditError(str(path), wrong, "give an audit.json") from error

    def to_json(self) -> str:
        """JSON, one row a line, so that two audits can be compared with any tool."""
        rows = ",\n".join(_dump(row._asdict()) for row in self.rows)
        head = f'"format":"{FORMAT}","version":{VERSION},"summary":{_dump(self.summary)}'
        return f'{{{head},"rows":[\n{rows}\n]}}\n'

    def to_csv(self) -> str:
        """CSV, one row a tensor; lists are written with spaces between, as spreadsheets like them."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        before = ("stride", "dtype", "device")
        fields = [name for name in Row._fields if name != "before"]
        writer.writerow([*fields, *(f"before_{name}" for name in before)])
        for row in self.rows:
            cells = [getattr(row, name) for name in fields]
            cells += [(row.before or {}).get(name) for name in before]
            writer.writerow([_cell(cell) for cell in cells])
        return out.getvalue()

    def diff(self, other: Audit) -> list[Difference]:
        """Every tensor that differs, in any field, sorted by name; empty where none does."""
        ours, theirs = ({row.path: row for row in audit.rows} for audit in (self, other))
        return [
            difference
            for path in sorted({*ours, *theirs})
            if (difference := _difference(path, ours.get(path), theirs.get(path)))
        ]


def audit(model: nn.Module, plan: Plan | None = None) -> Audit:
    """Reads every parameter, buffer and computed weight of `model`, as they are now.

    With the plan that was taken before `apply`, each row also says how the tensor was before, which
    steps wanted something of it, and what came of that. The judgement rests on the strides, dtypes
    and devices read here, never on what a step says it did.
    """
    from prepare.collector import paused_collector

    with paused_collector():
        return _audit(model, plan)


def _audit(model: nn.Module, plan: Plan | None) -> Audit:
    from prepare.tensors import (
        identity,
        name_of,
        named_modules,
        named_tensors,
        unregistered_tensors,
    )

    planned = {(t.module, t.tensor, t.kind): t for t in plan.tensors} if plan is not None else {}
    places = named_tensors(model)
    modules = dict(named_modules(model))
    shared: dict[Any, list[str]] = {}
    for place in places:
        shared.setdefault(identity(place.tensor), []).append(place.path)
    rows = []
    for place in places:
        key = (place.owner, place.name, place.kind)
        names = shared[identity(place.tensor)]
        others = tuple(sorted(p for p in names if p != place.path)) if len(names) > 1 else ()
        kind = type(modules[place.owner]).__name__
        rows.append(_read(place.tensor, kind, key, planned.get(key), others))
    for name, module in modules.items():
        rows += _computed_rows(name, module, planned)
    rows.sort(key=lambda row: (row.module, row.tensor, row.kind))
    summary = _summary(rows, _weights(places))
    summary["unregistered"] = [
        f"{path}: {name_of(tensor.dtype)} {tensor.device}"
        for path, tensor in unregistered_tensors(model)
    ]
    summary["unregistered"].sort()
    return Audit(rows, summary)


def _read(
    tensor: Tensor,
    type_: str,
    key: tuple[str, str, str],
    plan: TensorPlan | None,
    shared: tuple = (),
) -> Row:
    from prepare.tensors import is_strided, name_of

    module, name, kind = key
    strided = is_strided(tensor)
    shape = tuple(tensor.shape) if strided else None
    stride = tensor.stride() if strided else None
    dtype, device = name_of(tensor.dtype), name_of(tensor.device)
    layouts = satisfied(shape, stride) if strided else ()
    before, status, steps, reason = None, "untouched", (), None
    if plan is not None:
        before = plan.old._asdict()
        now = {"stride": stride, "dtype": dtype, "device": device}
        steps = plan.steps
        status, reason = _judge(plan, shape, now, layouts)
    return Row(
        module, type_, name, kind, shape, stride, dtype, device, layouts, shared,
        before, status, steps, reason,
    )  # fmt: skip


def _judge(
    plan: TensorPlan, shape: tuple[int, ...] | None, now: dict[str, Any], layouts: tuple[str, ...]
) -> tuple[str, str | None]:
    """The worst status that holds, and why."""
    missing = [
        f"{side.replace('_', ' ')} is {is_now}, not {wanted}"
        for side, wanted in plan.wants.items()
        if (is_now := _lacks(side, wanted, shape, now, layouts))
    ]
    if missing:
        return "ineffective", "; ".join(missing)
    if plan.off:
        return "skipped", "; ".join(f"{step}: {why}" for step, why in plan.off.items())
    if not plan.wants:
        return "untouched", None
    return ("already" if now == plan.old._asdict() else "converted"), None


def _lacks(
    side: str, wanted: str, shape: tuple | None, now: dict[str, Any], layouts: tuple[str, ...]
) -> str | None:
    """What stands in the place of what was wanted, or None where it is there."""
    if side == "memory_format":
        if shape is None or not takes(wanted, len(shape)):
            return "one of a tensor without strides" if shape is None else "another rank's"
        if now["stride"] == canonical_stride(shape, wanted):
            return None
        return f"{' and '.join(layouts) or 'none'} with strides {now['stride']}"
    have = now[side]
    # Wanting `cuda` is content with any of them; wanting `cuda:1` is not.
    same = have == wanted or (
        side == "device" and ":" not in wanted and have.split(":")[0] == wanted
    )
    return None if same else have


def _computed_rows(
    name: str, module: nn.Module, planned: dict[tuple[str, str, str], TensorPlan]
) -> Iterator[Row]:
    from prepare.computed import computed_tensors

    for tensor_name, value in computed_tensors(module).items():
        key = (name, tensor_name, "computed")
        plan, kind = planned.get(key), type(module).__name__
        if isinstance(value, str):
            wanted = plan is not None and bool(plan.wants)
            status = "ineffective" if wanted else "untouched"
            steps = plan.steps if plan else ()
            before = plan.old._asdict() if plan else None
            yield Row(*_order(key, kind), None, None, "", "", (), (), before, status, steps, value)
            continue
        row = _read(value, kind, key, plan)
        if row.status == "ineffective":
            row = row._replace(reason=f"forward computes this weight anew: {row.reason}")
        yield row


def _order(key: tuple[str, str, str], kind: str) -> tuple[str, str, str, str]:
    module, tensor, tensor_kind = key
    return module, kind, tensor, tensor_kind


def _weights(places: Iterable[NamedTensor]) -> dict[str, set[tuple[str, str, str]]]:
    """For each convolution, the rows that are its weight, or stand behind it."""
    from torch.nn.modules.conv import _ConvNd

    found: dict[str, set[tuple[str, str, str]]] = {}
    for place in places:
        if isinstance(place.module, _ConvNd) and "weight" in (place.name, place.computes):
            rows = found.setdefault(place.module_name, {(place.module_name, "weight", "computed")})
            rows.add((place.owner, place.name, place.kind))
    return found


def _summary(rows: list[Row], weights: dict[str, set[tuple[str, str, str]]]) -> dict[str, Any]:
    held = [row for row in rows if row.kind != "computed"]
    once = [row for row in held if all(row.path <= other for other in row.shared_with)]
    by_key = {(row.module, row.tensor, row.kind): row for row in rows}
    worst = (
        min((by_key[key].status for key in keys if key in by_key), key=STATUSES.index)
        for keys in weights.values()
    )
    return {
        "tensors": len(once),
        "status": _count((row.status for row in rows), STATUSES),
        "convolutions": _count(worst, STATUSES),
        "bytes_before": sum(
            _bytes(row, (row.before or {}).get("dtype", row.dtype)) for row in once
        ),
        "bytes_after": sum(_bytes(row, row.dtype) for row in once),
        "dtypes": dict(sorted(Counter(row.dtype for row in once).items())),
        "devices": dict(sorted(Counter(row.device for row in once).items())),
    }


def _count(words: Iterable[str], order: tuple[str, ...]) -> dict[str, int]:
    counts = Counter(words)
    return {word: counts[word] for word in order}


def _bytes(row: Row, dtype: str) -> int:
    import torch

    return math.prod(row.shape) * getattr(torch, dtype).itemsize if row.shape is not None else 0


def _difference(path: str, ours: Row | None, theirs: Row | None) -> Difference | None:
    if ours is None or theirs is None:
        return Difference(path, "theirs" if ours is None else "ours", {})
    pairs = zip(Row._fields, ours, theirs, strict=True)
    fields = {name: (a, b) for name, a, b in pairs if a != b}
    return Difference(path, None, fields) if fields else None


def _row(data: dict[str, Any]) -> Row:
    row = Row(**data)
    before = row.before and {**row.before, "stride": _tuple(row.before["stride"])}
    lists = ("shape", "stride", "layouts", "shared_with", "steps")
    return row._replace(before=before, **{name: _tuple(getattr(row, name)) for name in lists})


def _tuple(value: list | None) -> tuple | None:
    return None if value is None else tuple(value)


def _dump(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _word(value: Any) -> str:
    return _dump(value) if isinstance(value, dict | tuple) else str(value)
