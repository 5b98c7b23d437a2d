"""Find what in a prepared model has drifted from its pipeline."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from torch import nn
from torch.optim import Optimizer

from prepare.core.model.tensors import name_of
from prepare.errors import DriftError, Problem
from prepare.pipeline.optimizer_state import (
    mismatched_state,
    same_element_order,
    unrelated_optimizer,
)
from prepare.pipeline.plan import Plan, State, state

_REMEDY = "apply the pipeline again, with optimizer= if one holds state; load checkpoints without assign=True"


@dataclass(frozen=True)
class Drift:
    """One property of one tensor, or one module, that is no longer as it was prepared."""

    where: str
    what: str
    is_now: object
    wanted: object

    def __str__(self) -> str:
        return f"{self.where}: {self.what} is {self.is_now}, prepared as {self.wanted}"


def plan_drift(plan: Plan) -> list[Drift]:
    """Return what a plan, made after `apply`, would change again."""
    drifts = [
        Drift(name or "the model", "the module", "as before", action.step)
        for action in plan.actions
        for name in action.modules
    ]
    for tensor in plan.tensors:
        drifts += _differences(tensor.path, tensor.old, tensor.new)
    return drifts


def optimizer_drift(model: nn.Module, optimizer: Optimizer) -> list[Drift]:
    """Return the optimizer state that does not match its parameters, and whether it trains `model` at all."""
    drifts = []
    if any(unrelated_optimizer(model, optimizer)):
        drifts.append(Drift("optimizer", "what it trains", "another model", "this one"))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for parameter, move in mismatched_state(optimizer, {}):
        tensor = move.tensors[0]
        if same_element_order(tensor, parameter):
            continue
        where = f"{move.path} of {names.get(id(parameter), 'a parameter of another model')}"
        prepared = State(move.stride, name_of(move.dtype), name_of(move.device))
        drifts += _differences(where, state(tensor), prepared)
    return drifts


def raise_drift(drifts: Iterable[Drift]) -> None:
    """Raise a DriftError with one problem for each drift, if there are any."""
    problems = [Problem(d.where, f"{d.what} is {d.is_now}, prepared as {d.wanted}") for d in drifts]
    if problems:
        problems[-1] = replace(problems[-1], remedy=_REMEDY)
        raise DriftError.of(problems)


def _differences(path: str, current: State, prepared: State) -> list[Drift]:
    sides = zip(State._fields, current, prepared, strict=True)
    return [Drift(path, side, is_now, wanted) for side, is_now, wanted in sides if is_now != wanted]
