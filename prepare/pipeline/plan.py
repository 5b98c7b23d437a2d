"""The plan of a pipeline, as plain data: what it would change in a model, or what has drifted from it."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from prepare.core.model.tensors import dtype_text, name_of, stride_of
from prepare.core.utils.json_records import Readable
from prepare.errors import ConfigError, DriftError, Problem, raise_problems

_REMEDY = "apply the pipeline again, with optimizer= if one holds state; load checkpoints without assign=True"


class State(NamedTuple):
    """The state of a tensor: strides in elements (None without strides), names of dtype and device."""

    stride: tuple[int, ...] | None
    dtype: str
    device: str


class TensorPlan(NamedTuple):
    """One place of one tensor: its old and new state, and the steps that want it or were kept off.

    `kind` is parameter, buffer, or computed (the weight that forward would use, which is read and
    never changed). `wants` maps device, dtype and memory_format to the requested value, `by` to the
    steps that request it; `off` maps a step that was kept off to the reason.
    """

    module: str
    tensor: str
    kind: str
    shape: tuple[int, ...] | None
    old: State
    new: State
    wants: Mapping[str, str]
    by: Mapping[str, tuple[str, ...]]
    off: Mapping[str, str]
    shared_with: tuple[str, ...] = ()
    bytes_old: int = 0
    bytes_new: int = 0

    @property
    def path(self) -> str:
        """Return the dotted name, as in `state_dict`."""
        return f"{self.module}.{self.tensor}" if self.module else self.tensor

    @property
    def changes(self) -> bool:
        """Return whether this tensor would change."""
        return self.old != self.new

    @property
    def steps(self) -> tuple[str, ...]:
        """Return the steps that want something of this tensor, each once."""
        return steps_of(self.by)

    @property
    def changing(self) -> tuple[str, ...]:
        """Return the steps whose request differs from the old state."""
        differs = {
            "device": self.old.device != self.new.device,
            "dtype": self.old.dtype != self.new.dtype,
            "memory_format": self.old.stride != self.new.stride,
        }
        return steps_of({side: steps for side, steps in self.by.items() if differs[side]})


@dataclass(frozen=True)
class Action:
    """The modules that a structure, runtime or input step would change."""

    step: str
    phase: str
    modules: tuple[str, ...]


@dataclass(frozen=True, repr=False)
class Plan(Readable):
    """The changes that a pipeline would make to one model; false if it would change nothing.

    `tensors` holds every place of every tensor, sorted by name; `actions` the structure, runtime
    and input steps that would change something; `errors` the requests without effect, and known
    issues with wrong numbers; `warnings` known issues that make the model slow, or wrong only in
    parts that are not used now. `training_errors` are the reasons why the model cannot be trained so,
    whatever its mode is now.
    """

    steps: dict[str, dict[str, Any]]
    tensors: list[TensorPlan]
    actions: list[Action] = field(default_factory=list)
    errors: list[ConfigError] = field(default_factory=list)
    warnings: list[Problem] = field(default_factory=list)
    training_errors: list[Problem] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.actions) or any(tensor.changes for tensor in self.tensors)

    def summary(self) -> dict[str, Any]:
        """Return counts and bytes; a tensor in several places counts once."""
        stored = (t for t in self.tensors if t.kind != "computed")
        once = [t for t in stored if all(t.path <= other for other in t.shared_with)]
        changing = [t for t in once if t.changes]
        by_step = Counter(step for t in changing for step in t.changing)
        return {
            "tensors": len(once),
            "to_change": len(changing),
            "by_step": dict(sorted(by_step.items())),
            "bytes_before": sum(t.bytes_old for t in once),
            "bytes_after": sum(t.bytes_new for t in once),
            "bytes_written": sum(t.bytes_new for t in changing),
        }

    def to_dict(self) -> dict[str, Any]:
        """Return the content of `plan.json`."""
        return {
            "format": "prepare.plan",
            "version": 1,
            "summary": self.summary(),
            "steps": self.steps,
            "actions": [asdict(action) for action in self.actions],
            "problems": [asdict(problem) for error in self.errors for problem in error.problems],
            "warnings": [asdict(warning) for warning in self.warnings],
            "training_errors": [asdict(problem) for problem in self.training_errors],
            "tensors": [
                tensor._asdict() | {"old": tensor.old._asdict(), "new": tensor.new._asdict()}
                for tensor in self.tensors
            ],
        }


def state(tensor: Tensor) -> State:
    """Return the current state of a tensor."""
    return State(stride_of(tensor), dtype_text(tensor), name_of(tensor.device))


def steps_of(by: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """Return the steps in a mapping from device, dtype and memory_format to steps, each once."""
    return tuple(dict.fromkeys(step for steps in by.values() for step in steps))


@dataclass(frozen=True)
class Drift:
    """One property of one tensor, or one module, that is no longer as it was prepared."""

    where: str
    what: str
    is_now: object
    wanted: object

    def __str__(self) -> str:
        return str(self.problem())

    def problem(self, remedy: str = "") -> Problem:
        """Return it as a part of a DriftError."""
        wrong = f"{self.what} is {self.is_now}, prepared as {self.wanted}"
        return Problem(self.where, wrong, remedy)


def plan_drift(plan: Plan) -> Iterator[Drift]:
    """Yield what a plan, made after `apply`, would change again."""
    for action in plan.actions:
        for name in action.modules:
            yield Drift(name or "the model", "the module", "as before", action.step)
    for tensor in plan.tensors:
        yield from drifts_between(tensor.path, tensor.old, tensor.new)


def drifts_between(path: str, current: State, prepared: State) -> Iterator[Drift]:
    """Yield what differs between two states of a tensor."""
    for side, is_now, wanted in zip(State._fields, current, prepared, strict=True):
        if is_now != wanted:
            yield Drift(path, side, is_now, wanted)


def raise_drift(drifts: Sequence[Drift]) -> None:
    """Raise a DriftError with one problem for each drift, if there are any; the last one has the remedy."""
    problems = [each.problem(_REMEDY if each is drifts[-1] else "") for each in drifts]
    raise_problems(DriftError, problems)
