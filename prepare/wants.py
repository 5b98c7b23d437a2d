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
from prepare.patterns import NORMS, matches, near_misses
from prepare.step import TensorStep, Want
from prepare.tensors import NamedTensor, is_strided, named_tensors
from prepare.transfer import Move

_OPTIONS = ("include", "exclude", "keep")


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


class _Asked:
    """What came of asking one step: which modules it has to do with, and which patterns matched."""

    def __init__(self, step: TensorStep) -> None:
        self.step = step
        self.candidates: dict[str, nn.Module] = {}
        self.patterns = {option: step.chosen(option) for option in _OPTIONS if step.chosen(option)}
        self.used: set[tuple[str, str]] = set()

    def kept_off(self, place: NamedTensor) -> str | None:
        """Why a pattern keeps the step off this tensor, or None."""
        if not self.patterns:
            return None
        found: dict[str, str] = {}
        for option, chosen in self.patterns.items():
            for pattern in chosen:
                if matches(pattern, place.module_name, place.module):
                    self.used.add((option, pattern))
                    found.setdefault(option, pattern)
        for option in ("exclude", "keep"):
            if option in found:
                return f"{option}: {found[option]}"
        if "include" in self.patterns and "include" not in found:
            return "include: no pattern matches"
        return None

    def dead_patterns(self) -> Iterable[ConfigError]:
        """An error for every pattern that matched nothing; `norms` may match nothing."""
        for option, chosen in self.patterns.items():
            for pattern in chosen:
                if pattern != NORMS and (option, pattern) not in self.used:
                    wrong = f"{pattern!r} matches no module that {self.step.name} prepares"
                    where = f"steps.{self.step.name}.{option}"
                    yield PatternError(where, wrong, near_misses(pattern, self.candidates))


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
    dead = (error for one in asked for error in one.dead_patterns())
    return Table(found, [*dead, *_without_effect(model, steps, found)])


def preserved_stride(tensor: Tensor) -> tuple[int, ...]:
    """The strides a cast or a move keeps, as `Tensor.to` does: its own where it is dense."""
    if satisfied(tensor.shape, tensor.stride()):
        return tensor.stride()
    return torch.empty_like(tensor, device="meta").stride()


def _ask(asked: _Asked, wanted: Wanted, conflicts: list[Problem]) -> None:
    step = asked.step
    wants = []
    off = None
    for place in wanted.places:
        if sides := _sides(step, place):
            wants.append((place, sides))
            asked.candidates[place.module_name] = place.module
            if why := asked.kept_off(place):
                # An exclusion in one place holds in all: the tensor is one and the same.
                off = f"{why} (as {place.path})" if len(wanted.places) > 1 else why
    if off:
        wanted.off[step.name] = off
        return
    for place, sides in wants:
        for side, value in sides:
            had, steps = wanted.wants.setdefault(side, (value, []))
            if had != value:
                wrong = f"{steps[0]} wants {had}, and {step.name} wants {value}"
                conflicts.append(Problem(place.path, wrong, "drop one step, or exclude the module"))
            elif step.name not in steps:
                steps.append(step.name)


def _sides(step: TensorStep, place: NamedTensor) -> tuple[tuple[str, str], ...]:
    """What `step` wants of this tensor, side by side, checked."""
    try:
        want = step.want(place)
    except Exception as error:
        wrong = f"want() raised on {place.path}: {type(error).__name__}: {error}"
        raise StepError(f"steps.{step.name}", wrong) from error
    if want is None:
        return ()
    if not isinstance(want, Want):
        raise StepError(f"steps.{step.name}", f"want() gave {want!r}", "give a Want or None")
    try:
        return _checked(want.device, want.dtype, want.memory_format, place.tensor.dim())
    except ValueError as error:
        raise StepError(f"steps.{step.name}", f"of {place.path} it {error}") from None


@cache
def _checked(
    device: str | None, dtype: str | None, memory_format: str | None, rank: int
) -> tuple[tuple[str, str], ...]:
    if memory_format is not None and memory_format not in FORMATS:
        raise ValueError(f"wants the memory format {memory_format!r}, which is none of {FORMATS}")
    if memory_format is not None and not takes(memory_format, rank):
        raise ValueError(f"wants {memory_format}, and it has {rank} dimensions")
    if dtype is not None and not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise ValueError(f"wants the dtype {dtype!r}, which torch does not have")
    sides = (("device", device), ("dtype", dtype), ("memory_format", memory_format))
    return tuple((side, value) for side, value in sides if value is not None)


@cache
def _parsed_device(name: str) -> torch.device:
    return torch.device(name)


def _device(name: str | None, now: torch.device) -> torch.device:
    """The device of that name; a tensor on cuda:1 is where `cuda` wants it."""
    if name is None:
        return now
    wanted = _parsed_device(name)
    return now if wanted.index is None and wanted.type == now.type else wanted


def _without_effect(
    model: nn.Module, steps: Sequence[TensorStep], tensors: list[Wanted]
) -> Iterable[ConfigError]:
    """All memory-format steps are one request, which has no effect only if none matched anything."""
    formats = [step for step in steps if hasattr(step, "memory_format")]
    if formats and not any("memory_format" in wanted.wants for wanted in tensors):
        where = ", ".join(f"steps.{step.name}" for step in formats)
        meanings = dict.fromkeys(step.nothing_matched(model) for step in formats)
        yield NothingMatchesError(where, "; ".join(meanings))
