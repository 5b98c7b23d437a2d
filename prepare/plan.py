"""What a pipeline would do to a model, tensor by tensor, as plain data."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from prepare.computed import computed_tensors
from prepare.errors import ConfigError
from prepare.tensors import NamedTensor, is_strided
from prepare.wants import Table, Wanted


class State(NamedTuple):
    """How a tensor lies: strides in elements (None where it has none), dtype and device by name."""

    stride: tuple[int, ...] | None
    dtype: str
    device: str


class TensorPlan(NamedTuple):
    """One place of one tensor: how it is, how it is to be, and who wants that or was kept off.

    `kind` is parameter, buffer, or computed (the weight that forward would use, which is looked at
    and never acted on). `wants` maps device, dtype and memory_format to what is wanted; `steps`
    are those that want it; `off` maps a step that was kept off to the reason.
    """

    module: str
    tensor: str
    kind: str
    shape: tuple[int, ...] | None
    old: State
    new: State
    wants: dict[str, str]
    steps: tuple[str, ...]
    off: dict[str, str]
    shared_with: tuple[str, ...] = ()
    bytes_old: int = 0
    bytes_new: int = 0

    @property
    def changes(self) -> bool:
        """Whether anything is to be done to this tensor."""
        return self.old != self.new


@dataclass(frozen=True)
class Action:
    """What a step that is no tensor step would do: to which modules."""

    step: str
    phase: str
    modules: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """What a pipeline would do to one model; false when there is nothing to do.

    `tensors` holds every place of every tensor, sorted by name; `actions` the structure, runtime
    and input steps that have something to do; `errors` the requests that come to nothing.
    """

    steps: dict[str, dict[str, Any]]
    tensors: list[TensorPlan]
    actions: list[Action] = field(default_factory=list)
    errors: list[ConfigError] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.actions) or any(tensor.changes for tensor in self.tensors)

    def summary(self) -> dict[str, Any]:
        """Counts and bytes; a tensor that stands in several places counts once."""
        once = [t for t in self.tensors if t.kind != "computed" and _is_first_place(t)]
        changing = [t for t in once if t.changes]
        by_step = Counter(step for t in changing for step in t.steps)
        return {
            "tensors": len(once),
            "to_change": len(changing),
            "by_step": dict(sorted(by_step.items())),
            "bytes_before": sum(t.bytes_old for t in once),
            "bytes_after": sum(t.bytes_new for t in once),
            "bytes_written": sum(t.bytes_new for t in changing),
        }

    def to_dict(self) -> dict[str, Any]:
        """The content of `plan.json`."""
        return {
            "format": "prepare.plan",
            "version": 1,
            "summary": self.summary(),
            "steps": self.steps,
            "actions": [asdict(action) for action in self.actions],
            "problems": [str(problem) for error in self.errors for problem in error.problems],
            "tensors": [
                tensor._asdict() | {"old": tensor.old._asdict(), "new": tensor.new._asdict()}
                for tensor in self.tensors
            ],
        }


def tensor_plans(table: Table) -> list[TensorPlan]:
    """The table as plain data, a row for every place, and one for every computed weight."""
    plans = [plan for wanted in table.tensors for plan in _places(wanted)]
    plans += _computed(table)
    return sorted(plans, key=lambda plan: (plan.module, plan.tensor, plan.kind))


def state(tensor: Tensor) -> State:
    """How a tensor lies now."""
    stride = tensor.stride() if is_strided(tensor) else None
    return State(stride, str(tensor.dtype).removeprefix("torch."), str(tensor.device))


def _is_first_place(plan: TensorPlan) -> bool:
    path = f"{plan.module}.{plan.tensor}" if plan.module else plan.tensor
    return all(path <= other for other in plan.shared_with)


def _places(wanted: Wanted) -> Iterable[TensorPlan]:
    tensor, move = wanted.tensor, wanted.move()
    old = new = state(tensor)
    if move:
        new = State(move.stride, str(move.dtype).removeprefix("torch."), str(move.device))
    shape = tuple(tensor.shape) if is_strided(tensor) else None
    numel = tensor.numel() if shape is not None else 0
    paths = sorted(place.path for place in wanted.places)
    for place in wanted.places:
        yield TensorPlan(
            module=place.owner,
            tensor=place.name,
            kind=place.kind,
            shape=shape,
            old=old,
            new=new,
            wants={side: value for side, (value, _) in wanted.wants.items()},
            steps=tuple(wanted.steps()),
            off=dict(wanted.off),
            shared_with=tuple(path for path in paths if path != place.path)
            if len(paths) > 1
            else (),
            bytes_old=numel * tensor.element_size(),
            bytes_new=numel * (move.dtype if move else tensor.dtype).itemsize,
        )


def _computed(table: Table) -> Iterable[TensorPlan]:
    behind: dict[tuple[str, str], list[tuple[Wanted, NamedTensor]]] = {}
    modules = {}
    for wanted in table.tensors:
        for place in wanted.places:
            modules[place.module_name] = place.module
            key = (place.module_name, place.computes or place.name)
            behind.setdefault(key, []).append((wanted, place))
    for name, module in modules.items():
        for tensor_name, value in computed_tensors(module).items():
            yield _computed_plan(name, tensor_name, value, behind.get((name, tensor_name), []))


def _computed_plan(
    module: str, name: str, value: Tensor | str, behind: list[tuple[Wanted, NamedTensor]]
) -> TensorPlan:
    """A computed weight is expected to have what is wanted of the tensors it is computed from."""
    known = isinstance(value, Tensor)
    now = state(value) if known else State(None, "", "")
    wants = {}
    for wanted, _ in behind:
        for side, (want, _) in wanted.wants.items():
            wants.setdefault(side, want)
    return TensorPlan(
        module=module,
        tensor=name,
        kind="computed",
        shape=tuple(value.shape) if known else None,
        old=now,
        new=now,
        wants=wants,
        steps=tuple(dict.fromkeys(step for wanted, _ in behind for step in wanted.steps())),
        off={step: why for wanted, _ in behind for step, why in wanted.off.items()},
    )
