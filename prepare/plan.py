"""What a pipeline would do to a model, tensor by tensor, as plain data."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from prepare.core.model.tensors import is_strided, name_of
from prepare.errors import ConfigError, Problem


class State(NamedTuple):
    """How a tensor lies: strides in elements (None where it has none), dtype and device by name."""

    stride: tuple[int, ...] | None
    dtype: str
    device: str


class TensorPlan(NamedTuple):
    """One place of one tensor: how it is, how it is to be, and who wants that or was kept off.

    `kind` is parameter, buffer, or computed (the weight that forward would use, which is looked at
    and never acted on). `wants` maps device, dtype and memory_format to what is wanted, `by` to the
    steps that want it; `off` maps a step that was kept off to the reason.
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
    def changes(self) -> bool:
        """Whether anything is to be done to this tensor."""
        return self.old != self.new

    @property
    def steps(self) -> tuple[str, ...]:
        """The steps that want something of it, each once."""
        return steps_of(self.by)

    @property
    def changing(self) -> tuple[str, ...]:
        """The steps that want what is not so yet."""
        differs = {
            "device": self.old.device != self.new.device,
            "dtype": self.old.dtype != self.new.dtype,
            "memory_format": self.old.stride != self.new.stride,
        }
        return steps_of({side: steps for side, steps in self.by.items() if differs[side]})


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
    and input steps that have something to do; `errors` the requests that come to nothing, and what
    is known to go wrong; `warnings` what is known to be slow, or wrong where it does not matter now.
    """

    steps: dict[str, dict[str, Any]]
    tensors: list[TensorPlan]
    actions: list[Action] = field(default_factory=list)
    errors: list[ConfigError] = field(default_factory=list)
    warnings: list[Problem] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.actions) or any(tensor.changes for tensor in self.tensors)

    def summary(self) -> dict[str, Any]:
        """Counts and bytes; a tensor that stands in several places counts once."""
        once = [t for t in self.tensors if t.kind != "computed" and _is_first_place(t)]
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
        """The content of `plan.json`."""
        return {
            "format": "prepare.plan",
            "version": 1,
            "summary": self.summary(),
            "steps": self.steps,
            "actions": [asdict(action) for action in self.actions],
            "problems": [str(problem) for error in self.errors for problem in error.problems],
            "warnings": [str(warning) for warning in self.warnings],
            "tensors": [
                tensor._asdict() | {"old": tensor.old._asdict(), "new": tensor.new._asdict()}
                for tensor in self.tensors
            ],
        }


def state(tensor: Tensor) -> State:
    """How a tensor lies now."""
    stride = tensor.stride() if is_strided(tensor) else None
    return State(stride, name_of(tensor.dtype), name_of(tensor.device))


def _is_first_place(plan: TensorPlan) -> bool:
    path = f"{plan.module}.{plan.tensor}" if plan.module else plan.tensor
    return all(path <= other for other in plan.shared_with)


def steps_of(by: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """The steps in a mapping from sides to steps, each once."""
    return tuple(dict.fromkeys(step for steps in by.values() for step in steps))
