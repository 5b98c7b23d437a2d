"""What all tensor steps of a pipeline want of each tensor of a model, merged into one table."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor, nn

from prepare.errors import (
    ConfigError,
    ConflictError,
    NothingMatchesError,
    PatternError,
    Problem,
    StepError,
)
from prepare.layout import FORMATS, canonical_stride, satisfied, takes
from prepare.patterns import NORMS, near_misses
from prepare.step import TensorStep, Want, kept_off
from prepare.tensors import NamedTensor, is_strided, named_tensors
from prepare.transfer import Move


@dataclass(slots=True)
class Wanted:
    """One tensor, everywhere it stands in the model, and what is wanted of it.

    `wants` maps each side (device, dtype, memory_format) to what is wanted and the steps that want
    it; `off` maps a step that a pattern keeps off this tensor to the reason.
    """

    tensor: Tensor
    places: list[NamedTensor]
    wants: dict[str, tuple[str, list[str]]] = field(default_factory=dict)
    off: dict[str, str] = field(default_factory=dict)

    def steps(self) -> list[str]:
        """The steps that want something of this tensor, in their order, each once."""
        return list(dict.fromkeys(step for _, steps in self.wants.values() for step in steps))

    def target(self) -> Move:
        """How this tensor is to be: its device, dtype and strides, those it has where nothing is wanted."""
        tensor = self.tensor
        device, dtype, memory_format = (
            self.wants.get(side, (None,))[0] for side in ("device", "dtype", "memory_format")
        )
        to_device = _device(device, tensor.device)
        to_dtype = getattr(torch, dtype) if dtype else tensor.dtype
        if not is_strided(tensor):
            stride = None
        elif memory_format:
            stride = canonical_stride(tensor.shape, memory_format)
        elif (to_device, to_dtype) == (tensor.device, tensor.dtype):
            stride = tensor.stride()
        else:
            stride = preserved_stride(tensor)
        return Move(tensor, to_device, to_dtype, stride)

    def move(self) -> Move | None:
        """What is to be done, or None where the tensor is as wanted."""
        move, tensor = self.target(), self.tensor
        moved = (move.device, move.dtype) != (tensor.device, tensor.dtype)
        restrided = move.stride is not None and move.stride != tensor.stride()
        return move if moved or restrided else None


@dataclass(frozen=True)
class Table:
    """Every tensor of a model with what is wanted of it, and the requests that came to nothing."""

    tensors: list[Wanted]
    errors: list[ConfigError]

    def moves(self) -> list[Move]:
        """What is to be done, tensor by tensor."""
        return [move for wanted in self.tensors if (move := wanted.move())]


@dataclass(slots=True)
class _Asked:
    """What came of asking one step: which modules it has to do with, and which patterns matched."""

    step: TensorStep
    candidates: dict[str, nn.Module] = field(default_factory=dict)
    used: set[tuple[str, str]] = field(default_factory=set)


def make_table(model: nn.Module, steps: Sequence[TensorStep]) -> Table:
    """Asks every step for every tensor.

    Raises:
        ConflictError: two steps want different things of one tensor; all such pairs at once.
        StepError: a step raised, or wants what a tensor cannot have.
    """
    tensors: dict[int, Wanted] = {}
    for place in named_tensors(model):
        key = id(place.tensor)
        if key not in tensors:
            tensors[key] = Wanted(place.tensor, [])
        tensors[key].places.append(place)
    asked = [_Asked(step) for step in steps]
    conflicts: list[Problem] = []
    for wanted in tensors.values():
        for one in asked:
            _ask(one, wanted, conflicts)
    if conflicts:
        raise ConflictError.of(conflicts)
    found = list(tensors.values())
    return Table(found, [*_dead_patterns(asked), *_without_effect(model, steps, found)])


def preserved_stride(tensor: Tensor) -> tuple[int, ...]:
    """The strides a cast or a move keeps, as `Tensor.to` does: its own where it is dense."""
    if satisfied(tensor.shape, tensor.stride()):
        return tensor.stride()
    return torch.empty_like(tensor, device="meta").stride()


def _ask(asked: _Asked, wanted: Wanted, conflicts: list[Problem]) -> None:
    step = asked.step
    wants = [(place, want) for place in wanted.places if (want := _want(step, place))]
    for place, _ in wants:
        asked.candidates[place.module_name] = place.module
    reasons = [(place, why) for place, _ in wants if (why := kept_off(step, place, asked.used))]
    if reasons:
        # An exclusion in one place holds in all: the tensor is one and the same.
        place, reason = reasons[0]
        shared = len(wanted.places) > 1
        wanted.off[step.name] = f"{reason} (as {place.path})" if shared else reason
        return
    for place, want in wants:
        for side, value in want.sides().items():
            had, steps = wanted.wants.setdefault(side, (value, []))
            if had != value:
                wrong = f"{steps[0]} wants {had}, and {step.name} wants {value}"
                conflicts.append(Problem(place.path, wrong, "drop one step, or exclude the module"))
            elif step.name not in steps:
                steps.append(step.name)


def _want(step: TensorStep, place: NamedTensor) -> Want | None:
    try:
        want = step.want(place)
    except Exception as error:
        wrong = f"want() raised on {place.path}: {type(error).__name__}: {error}"
        raise StepError(f"steps.{step.name}", wrong) from error
    if want is None or not want.sides():
        return None
    if not isinstance(want, Want):
        raise StepError(f"steps.{step.name}", f"want() gave {want!r}", "give a Want or None")
    _possible(step, place, want)
    return want


def _possible(step: TensorStep, place: NamedTensor, want: Want) -> None:
    wrong = None
    if want.memory_format is not None:
        if want.memory_format not in FORMATS:
            wrong = f"wants the memory format {want.memory_format!r}, which is none of {FORMATS}"
        elif not takes(want.memory_format, place.tensor.dim()):
            wrong = f"wants {want.memory_format} of {place.path}, which has {place.tensor.dim()} dimensions"
    if want.dtype is not None and not isinstance(getattr(torch, want.dtype, None), torch.dtype):
        wrong = f"wants the dtype {want.dtype!r}, which torch does not have"
    if wrong:
        raise StepError(f"steps.{step.name}", wrong)


@cache
def _parsed_device(name: str) -> torch.device:
    return torch.device(name)


def _device(name: str | None, now: torch.device) -> torch.device:
    """The device of that name; a tensor on cuda:1 is where `cuda` wants it."""
    if name is None:
        return now
    wanted = _parsed_device(name)
    return now if wanted.index is None and wanted.type == now.type else wanted


def _dead_patterns(asked: Iterable[_Asked]) -> Iterable[ConfigError]:
    for one in asked:
        for option in ("include", "exclude", "keep"):
            for pattern in one.step.chosen(option):
                if pattern != NORMS and (option, pattern) not in one.used:
                    yield PatternError(
                        f"steps.{one.step.name}.{option}",
                        f"{pattern!r} matches no module that {one.step.name} prepares",
                        near_misses(pattern, one.candidates),
                    )


def _without_effect(
    model: nn.Module, steps: Sequence[TensorStep], tensors: list[Wanted]
) -> Iterable[ConfigError]:
    """All memory-format steps are one request, which has no effect only if none matched anything."""
    formats = [step for step in steps if hasattr(step, "memory_format")]
    if formats and not any("memory_format" in wanted.wants for wanted in tensors):
        where = ", ".join(f"steps.{step.name}" for step in formats)
        meanings = dict.fromkeys(step.nothing_matched(model) for step in formats)
        yield NothingMatchesError(where, "; ".join(meanings))
