"""Find what in a prepared model has drifted from its pipeline, once or with a guard in the training loop."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from torch import Tensor, nn
from torch.optim import Optimizer

from prepare.core.model.tensors import name_of, stride_of
from prepare.errors import DriftError, Problem, RefusedError
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


class Guard:
    """Record the layout of a prepared model, and check it again on every `every`-th call.

    A check takes under a millisecond for 500 tensors, so a guard can run in the training loop:

    >>> model = nn.Conv2d(8, 8, 3)
    >>> guard = Guard(model, every=100)
    >>> guard()
    """

    def __init__(self, model: nn.Module, *, every: int = 1) -> None:
        if every < 1:
            raise RefusedError("every", f"{every} is not at least 1", "1 checks at every call")
        self._every, self._calls = every, 0
        self.record(model)

    def record(self, model: nn.Module) -> None:
        """Record how `model` is now; it is compared with this from now on."""
        self._modules = [
            (module._modules, key, child, type(child), f"{name}.{key}" if name else key)
            for name, module in model.named_modules()
            for key, child in module._modules.items()
        ]
        self._tensors = [
            (table, key, _layout(tensor), state(tensor), _path(name, key))
            for name, module in model.named_modules()
            for table in (module._parameters, module._buffers)
            for key, tensor in table.items()
            if tensor is not None
        ]

    def __call__(self) -> None:
        """Count the call; on every `every`-th one, raise DriftError if the model has drifted."""
        self._calls += 1
        if self._calls % self._every == 0:
            raise_drift(self.find_drift())

    def find_drift(self) -> list[Drift]:
        """Return what differs from the recorded layout now, whatever the count of calls."""
        drifts = []
        for children, key, child, cls, path in self._modules:
            current = children.get(key)
            if current is not child or type(current) is not cls:
                is_now = "another module" if current is not child else type(current).__name__
                drifts.append(Drift(path, "the module", is_now, cls.__name__))
        for table, name, layout, prepared, path in self._tensors:
            tensor = table.get(name)
            if tensor is None:
                drifts.append(Drift(path, "the tensor", "gone", "there"))
            elif _layout(tensor) != layout:
                drifts += _differences(path, state(tensor), prepared)
        return drifts


def _layout(tensor: Tensor) -> tuple[object, ...]:
    """Return what is compared at each check: a weight in 8 bits has the dtype of its results."""
    return stride_of(tensor), tensor.dtype, tensor.device, type(tensor)


def _differences(path: str, current: State, prepared: State) -> list[Drift]:
    sides = zip(State._fields, current, prepared, strict=True)
    return [Drift(path, side, is_now, wanted) for side, is_now, wanted in sides if is_now != wanted]


def _path(module: str, name: str) -> str:
    return f"{module}.{name}" if module else name
