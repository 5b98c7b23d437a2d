"""Reads a model into the rows of an audit, and judges them against a plan by what it reads itself."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from prepare.audit.rows import STATUSES, Row
from prepare.core.model.computed_weights import computed_tensors
from prepare.core.model.memory_format import canonical_stride, satisfied, takes
from prepare.core.model.tensors import (
    NamedTensor,
    identity,
    is_strided,
    name_of,
    named_modules,
    named_tensors,
    unregistered_tensors,
)

if TYPE_CHECKING:
    from prepare.plan import Plan, TensorPlan


def read_model(model: nn.Module, plan: Plan | None) -> tuple[list[Row], dict[str, Any]]:
    """Every row, sorted by name, and the summary."""
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
    return rows, summary


def _read(
    tensor: Tensor,
    type_: str,
    key: tuple[str, str, str],
    plan: TensorPlan | None,
    shared: tuple = (),
) -> Row:

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


def _weights(places: Iterable[NamedTensor]) -> list[set[tuple[str, str, str]]]:
    """For each convolution, the rows that are its weight, or stand behind it.

    A module that stands in several places is one convolution.
    """
    found: dict[int, set[tuple[str, str, str]]] = {}
    for place in places:
        if isinstance(place.module, _ConvNd) and "weight" in (place.name, place.computes):
            rows = found.setdefault(id(place.module), set())
            rows.add((place.module_name, "weight", "computed"))
            rows.add((place.owner, place.name, place.kind))
    return list(found.values())


def _summary(rows: list[Row], weights: list[set[tuple[str, str, str]]]) -> dict[str, Any]:
    held = [row for row in rows if row.kind != "computed"]
    once = [row for row in held if all(row.path <= other for other in row.shared_with)]
    by_key = {(row.module, row.tensor, row.kind): row for row in rows}
    worst = (
        min((by_key[key].status for key in keys if key in by_key), key=STATUSES.index)
        for keys in weights
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
    return math.prod(row.shape) * getattr(torch, dtype).itemsize if row.shape is not None else 0
