"""Turn the table of tensor requests into the rows of a plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from torch import Tensor, nn

from prepare.core.model.own_code import computed_tensors
from prepare.core.model.quantized import stored_bytes
from prepare.core.model.tensors import NamedTensor, name_of
from prepare.plan import State, TensorPlan, state

if TYPE_CHECKING:
    from prepare.pipeline.tensor_table import RequestTable, TensorRequest
    from prepare.step import Storage


def tensor_plans(
    table: RequestTable, storages: Mapping[str, Mapping[str, Storage]]
) -> list[TensorPlan]:
    """Return a row for every place that holds a tensor, and one for every computed weight, sorted."""
    plans = [plan for request in table.requests for plan in _stored_plans(request)]
    for step, by_path in storages.items():
        plans = [_with_storage(plan, step, by_path.get(plan.path)) for plan in plans]
    plans += _computed_plans(table)
    return sorted(plans, key=lambda plan: (plan.module, plan.tensor, plan.kind))


def _stored_plans(request: TensorRequest) -> Iterable[TensorPlan]:
    """Yield a row for every place that holds the tensor."""
    tensor, move, places = request.tensor, request.move(), request.places
    old = new = state(tensor)
    strided = old.stride is not None
    bytes_old = bytes_new = stored_bytes(tensor) if strided else 0
    if move:
        new = State(move.stride, name_of(move.dtype), name_of(move.device))
        bytes_new = tensor.numel() * move.dtype.itemsize if new.stride is not None else 0
    shape = tuple(tensor.shape) if strided else None
    wants, by, off = request.wants, request.by, request.skipped
    paths = sorted(place.path for place in places) if len(places) > 1 else ()
    for _, _, name, kind, _, owner, _ in places:
        shared = tuple(p for p in paths if p != (f"{owner}.{name}" if owner else name))
        # By position: a model can have ten thousand rows, and keywords add half of the time.
        yield TensorPlan(
            owner, name, kind, shape, old, new, wants, by, off, shared, bytes_old, bytes_new
        )


def _with_storage(plan: TensorPlan, step: str, storage: Storage | None) -> TensorPlan:
    """Return the row with what a model step does to the tensor after its transfer, or why it leaves it."""
    if storage is None:
        return plan
    if storage.dtype is None:
        if storage.is_excluded:
            return plan._replace(off={**plan.off, step: storage.reason})
        return plan._replace(left={**(plan.left or {}), step: storage.reason})
    return plan._replace(
        new=plan.new._replace(dtype=storage.dtype),
        wants={**plan.wants, "dtype": storage.dtype},
        by={**plan.by, "dtype": (*plan.by.get("dtype", ()), step)},
        bytes_new=storage.bytes,
    )


def _computed_plans(table: RequestTable) -> Iterable[TensorPlan]:
    """Yield a row for every computed weight of every module that holds tensors."""
    modules: dict[str, nn.Module] = {}
    sources: dict[str, list[tuple[TensorRequest, NamedTensor]]] = {}
    for request in table.requests:
        for place in request.places:
            modules[place.module_name] = place.module
            sources.setdefault(place.module_name, []).append((request, place))
    for name, module in modules.items():
        for weight, value in computed_tensors(module).items():
            requests = [r for r, place in sources[name] if weight in (place.name, place.computes)]
            yield _computed_plan(name, weight, value, requests)


def _computed_plan(
    module: str, name: str, value: Tensor | str, sources: list[TensorRequest]
) -> TensorPlan:
    """Return the row of a computed weight: it inherits the requests of its source tensors.

    `value` is an error message, not a tensor, if the weight cannot be computed.
    """
    tensor = value if isinstance(value, Tensor) else None
    current = State(None, "", "") if tensor is None else state(tensor)
    wants: dict[str, str] = {}
    by: dict[str, tuple[str, ...]] = {}
    for request in sources:
        for side, want in request.wants.items():
            if side not in wants:
                wants[side], by[side] = want, request.by[side]
    return TensorPlan(
        module=module,
        tensor=name,
        kind="computed",
        shape=None if tensor is None else tuple(tensor.shape),
        old=current,
        new=current,
        wants=wants,
        by=by,
        off={step: reason for request in sources for step, reason in request.skipped.items()},
    )
