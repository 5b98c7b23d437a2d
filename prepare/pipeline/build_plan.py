"""Turn the table of wanted tensors into the rows of a plan."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch import Tensor, nn

from prepare.core.model.computed_weights import computed_tensors
from prepare.core.model.tensors import NamedTensor, name_of
from prepare.plan import State, TensorPlan, state

if TYPE_CHECKING:
    from prepare.pipeline.tensor_table import Table, Wanted


def tensor_plans(table: Table) -> list[TensorPlan]:
    """The table as plain data, a row for every place, and one for every computed weight."""
    plans = [plan for wanted in table.tensors for plan in _places(wanted)]
    plans += _computed(table)
    return sorted(plans, key=lambda plan: (plan.module, plan.tensor, plan.kind))


def _places(wanted: Wanted) -> Iterable[TensorPlan]:
    tensor, move, places = wanted.tensor, wanted.move(), wanted.places
    old = new = state(tensor)
    strided = old.stride is not None
    bytes_old = bytes_new = tensor.nbytes if strided else 0
    if move:
        new = State(move.stride, name_of(move.dtype), name_of(move.device))
        bytes_new = tensor.numel() * move.dtype.itemsize if new.stride is not None else 0
    shape = tuple(tensor.shape) if strided else None
    wants, by, off = wanted.wants, wanted.by, wanted.off
    paths = sorted(place.path for place in places) if len(places) > 1 else ()
    for _, _, name, kind, _, owner, _ in places:
        shared = tuple(p for p in paths if p != (f"{owner}.{name}" if owner else name))
        # By position: a model has ten thousands of them, and names cost half as much again.
        yield TensorPlan(
            owner, name, kind, shape, old, new, wants, by, off, shared, bytes_old, bytes_new
        )


def _computed(table: Table) -> Iterable[TensorPlan]:
    """A row for every computed weight of every module that holds tensors."""
    modules: dict[str, nn.Module] = {}
    behind: dict[str, list[tuple[Wanted, NamedTensor]]] = {}
    for wanted in table.tensors:
        for place in wanted.places:
            modules[place.module_name] = place.module
            behind.setdefault(place.module_name, []).append((wanted, place))
    for name, module in modules.items():
        for tensor_name, value in computed_tensors(module).items():
            parts = [w for w, at in behind[name] if tensor_name in (at.name, at.computes)]
            yield _computed_plan(name, tensor_name, value, parts)


def _computed_plan(module: str, name: str, value: Tensor | str, behind: list[Wanted]) -> TensorPlan:
    """A computed weight is expected to have what is wanted of the tensors it is computed from."""
    known = isinstance(value, Tensor)
    now = state(value) if known else State(None, "", "")
    wants: dict[str, str] = {}
    by: dict[str, tuple[str, ...]] = {}
    for wanted in behind:
        for side, want in wanted.wants.items():
            if side not in wants:
                wants[side], by[side] = want, wanted.by[side]
    return TensorPlan(
        module=module,
        tensor=name,
        kind="computed",
        shape=tuple(value.shape) if known else None,
        old=now,
        new=now,
        wants=wants,
        by=by,
        off={step: why for wanted in behind for step, why in wanted.off.items()},
    )
