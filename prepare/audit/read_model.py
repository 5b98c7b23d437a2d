"""Read a model into the rows of an audit, and judge each row against a plan."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from prepare.audit import STATUSES, AuditRow
from prepare.core.model.forward_overrides import computed_tensors
from prepare.core.model.memory_format import canonical_stride, satisfied, takes
from prepare.core.model.module_kinds import CONVOLUTIONS, CONVOLUTIONS_2D_3D, operation_of
from prepare.core.model.tensors import (
    NamedTensor,
    dtype_text,
    identity,
    inner_difference,
    is_strided,
    name_of,
    named_modules,
    named_tensors,
    stored_bytes,
    unregistered_tensors,
)

if TYPE_CHECKING:
    from prepare.pipeline.plan import Plan, TensorPlan


def read_model(model: nn.Module, plan: Plan | None) -> tuple[list[AuditRow], dict[str, Any]]:
    """Return the rows, sorted by name, and the summary."""
    planned = {(t.module, t.tensor, t.kind): t for t in plan.tensors} if plan is not None else {}
    places = named_tensors(model)
    modules = dict(named_modules(model))
    shared: dict[Any, list[str]] = {}
    for place in places:
        shared.setdefault(identity(place.tensor), []).append(place.path)
    rows = []
    for place in places:
        owner, key = modules[place.owner], (place.owner, place.name, place.kind)
        others = tuple(sorted({*shared[identity(place.tensor)]} - {place.path}))
        row = _read(place.tensor, type(owner).__name__, key, planned.get(key), others)
        is_weight = place.name == "weight" and isinstance(owner, CONVOLUTIONS)
        rows.append(row._replace(operation=operation_of(place.module)) if is_weight else row)
    for name, module in modules.items():
        rows += _computed_rows(name, module, planned)
    rows.sort(key=lambda row: (row.module, row.tensor, row.kind))
    sizes = {place.path: stored_bytes(place.tensor) for place in places if is_strided(place.tensor)}
    summary = _summary(rows, _convolution_weights(places), sizes)
    formats = {name for each in planned.values() for name in each.by.get("memory_format", ())}
    outside = unregistered_tensors(model)
    summary["format_steps"] = sorted(formats)
    summary["unregistered"] = sorted(f"{p}: {name_of(t.dtype)} {t.device}" for p, t in outside)
    found = (m for m in modules.values() if isinstance(m, CONVOLUTIONS_2D_3D))
    summary["first_input"] = [[2, m.in_channels, *[64] * len(m.kernel_size)] for m in found][:1]
    return rows, summary


def _read(
    tensor: Tensor,
    type_: str,
    key: tuple[str, str, str],
    plan: TensorPlan | None,
    shared: tuple[str, ...] = (),
) -> AuditRow:
    module, name, kind = key
    strided = is_strided(tensor)
    shape = tuple(tensor.shape) if strided else None
    stride = tensor.stride() if strided else None
    dtype, device = dtype_text(tensor), name_of(tensor.device)
    layouts = satisfied(shape, stride) if strided else ()
    row = AuditRow(
        module, type_, name, kind, shape, stride, dtype, device, layouts, shared,
        before=None, status="untouched", steps=(), reason=None,
    )  # fmt: skip
    if plan is None:
        return row
    status, reason = _judge(plan, row)
    if difference := inner_difference(tensor):
        status, reason = "ineffective", f"the tensor says {name_of(tensor.dtype)}, {difference}"
    return row._replace(before=plan.old._asdict(), status=status, steps=plan.steps, reason=reason)


def _judge(plan: TensorPlan, row: AuditRow) -> tuple[str, str | None]:
    """Return the worst status that applies, and its reason."""
    unmet = [
        f"{side.replace('_', ' ')} is {actual}, not {wanted}"
        for side, wanted in plan.wants.items()
        if (actual := _unmet(side, wanted, row))
    ]
    if unmet:
        return "ineffective", "; ".join(unmet)
    if plan.off:
        return "skipped", "; ".join(f"{step}: {reason}" for step, reason in plan.off.items())
    if not plan.wants:
        return "untouched", None
    return ("already" if plan.old == (row.stride, row.dtype, row.device) else "converted"), None


def _unmet(side: str, wanted: str, row: AuditRow) -> str | None:
    """Return the actual value of a property that is not as wanted, or None if it is."""
    if side == "memory_format":
        if row.shape is None:
            return "one of a tensor without strides"
        if not takes(wanted, len(row.shape)):
            return "another rank's"
        if row.stride == canonical_stride(row.shape, wanted):
            return None
        return f"{' and '.join(row.layouts) or 'none'} with strides {row.stride}"
    # The first word of `bfloat16 with int8 data`: a later step may store the values in another form.
    actual = row.dtype.partition(" ")[0]
    if side == "device":  # `cuda` is satisfied by any CUDA device; `cuda:1` is not
        actual = row.device if ":" in wanted else row.device.split(":")[0]
    return None if actual == wanted else actual


def _computed_rows(
    name: str, module: nn.Module, planned: dict[tuple[str, str, str], TensorPlan]
) -> Iterator[AuditRow]:
    for tensor_name, value in computed_tensors(module).items():
        key = (name, tensor_name, "computed")
        plan, kind = planned.get(key), type(module).__name__
        if isinstance(value, str):
            status = "ineffective" if plan and plan.wants else "untouched"
            before, steps = (plan.old._asdict(), plan.steps) if plan else (None, ())
            place = (name, kind, tensor_name, "computed")
            yield AuditRow(*place, None, None, "", "", (), (), before, status, steps, reason=value)
            continue
        row = _read(value, kind, key, plan)
        if row.status == "ineffective":
            row = row._replace(reason=f"forward computes this weight each time: {row.reason}")
        yield row


def _convolution_weights(places: Iterable[NamedTensor]) -> list[set[tuple[str, str, str]]]:
    """Return, for each convolution, the keys of the rows of its weight and of the weight's source tensors.

    A module with several names is one convolution.
    """
    rows_by_module: dict[int, set[tuple[str, str, str]]] = {}
    for place in places:
        if isinstance(place.module, _ConvNd) and "weight" in (place.name, place.computes):
            rows = rows_by_module.setdefault(id(place.module), set())
            rows.add((place.module_name, "weight", "computed"))
            rows.add((place.owner, place.name, place.kind))
    return list(rows_by_module.values())


def _summary(
    rows: list[AuditRow], weights: list[set[tuple[str, str, str]]], sizes: dict[str, int]
) -> dict[str, Any]:
    stored = [row for row in rows if row.kind != "computed"]
    unique = [row for row in stored if all(row.path <= other for other in row.shared_with)]
    by_key = {(row.module, row.tensor, row.kind): row for row in rows}
    worst_statuses = (
        min((by_key[key].status for key in keys if key in by_key), key=STATUSES.index)
        for keys in weights
    )
    return {
        "tensors": len(unique),
        "status": _count(row.status for row in rows),
        "convolutions": _count(worst_statuses),
        "bytes_before": sum(_bytes_before(row, sizes.get(row.path, 0)) for row in unique),
        "bytes_after": sum(sizes.get(row.path, 0) for row in unique),
        "dtypes": dict(sorted(Counter(row.dtype for row in unique).items())),
        "devices": dict(sorted(Counter(row.device for row in unique).items())),
    }


def _count(statuses: Iterable[str]) -> dict[str, int]:
    counts = Counter(statuses)
    return {status: counts[status] for status in STATUSES}


def _bytes_before(row: AuditRow, bytes_now: int) -> int:
    """Return the bytes before `apply`: as now, unless the dtype was another one."""
    dtype = (row.before or {}).get("dtype", row.dtype)
    if dtype == row.dtype or row.shape is None:
        return bytes_now
    return math.prod(row.shape) * getattr(torch, dtype.partition(" ")[0]).itemsize
