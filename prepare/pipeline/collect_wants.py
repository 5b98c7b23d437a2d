"""Asks the steps of a pipeline what they want of a model: of every tensor, merged, and of which modules."""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import cache, lru_cache

import torch
from torch import nn

from prepare.core.model.cast_protection import Protected
from prepare.core.model.memory_format import FORMATS, takes
from prepare.core.model.tensors import NamedTensor, identity, is_lazy, named_tensors
from prepare.errors import (
    ConfigError,
    ConflictError,
    NothingMatchesError,
    PatternError,
    Problem,
    StepError,
)
from prepare.patterns import NORMS, matches, near_misses
from prepare.pipeline.tensor_table import Table, Wanted
from prepare.step import ModuleStep, TensorStep, Want

_OPTIONS = ("include", "exclude", "keep")


def make_table(model: nn.Module, steps: Sequence[TensorStep]) -> Table:
    """Asks every step for every tensor.

    Raises:
        ConflictError: two steps want different things of one tensor; all such pairs at once.
        StepError: a step raised, or wants what a tensor cannot have.
    """
    tensors: dict[Hashable, Wanted] = {}
    for place in named_tensors(model):
        key = identity(place.tensor)
        if key not in tensors:
            tensors[key] = Wanted(place.tensor, [])
        tensors[key].places.append(place)
    asked = [_Asked(step) for step in steps]
    protected = Protected(model)
    conflicts = [
        problem for wanted in tensors.values() for problem in _ask(asked, wanted, protected)
    ]
    if conflicts:
        raise ConflictError.of(conflicts)
    found = list(tensors.values())
    dead = (error for one in asked for error in one.dead_patterns())
    return Table(found, [*dead, *_without_effect(model, steps, found)])


def targets(model: nn.Module, step: ModuleStep) -> tuple[tuple[str, ...], list[ConfigError]]:
    """The modules that `step` is yet to make as wanted, and the patterns of it that match nothing.

    An exclusion under one name of a module holds under all.
    """
    asked = _Asked(step)
    if not asked.patterns:
        return tuple(step.targets(model)), []
    modules = dict(model.named_modules(remove_duplicate=False))
    found = [name for name in step.candidates(model) if asked.module_kept_off(name, modules[name])]
    off = {id(modules[name]) for name in found}
    names = tuple(name for name in step.targets(model) if id(modules[name]) not in off)
    return names, list(asked.dead_patterns())


class _Asked:
    """What came of asking one step: which modules it has to do with, and which patterns matched."""

    def __init__(self, step: TensorStep | ModuleStep) -> None:
        self.step = step
        self.candidates: dict[str, nn.Module] = {}
        self._why: dict[str, str | None] = {}
        self.patterns = {option: step.chosen(option) for option in _OPTIONS if step.chosen(option)}
        self.used: set[tuple[str, str]] = set()

    def kept_off(self, places: Sequence[NamedTensor]) -> str | None:
        """Why a pattern keeps the step off this tensor, or None.

        An exclusion in one of its places holds in all: the tensor is one and the same.
        """
        # Every place is looked at, so that no pattern passes for dead which matches a later one.
        reasons = [self.module_kept_off(place.module_name, place.module) for place in places]
        for place, why in zip(places, reasons, strict=True):
            if why:
                return f"{why} (as {place.path})" if len(places) > 1 else why
        return None

    def module_kept_off(self, name: str, module: nn.Module) -> str | None:
        if name not in self._why:
            self.candidates[name] = module
            self._why[name] = self._matched(name, module)
        return self._why[name]

    def _matched(self, name: str, module: nn.Module) -> str | None:
        found: dict[str, str] = {}
        for option, chosen in self.patterns.items():
            for pattern in chosen:
                if matches(pattern, name, module):
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


def _ask(asked: list[_Asked], wanted: Wanted, protected: Protected) -> Iterable[Problem]:
    """Fills in what the steps want of one tensor; gives what they disagree about."""
    if is_lazy(wanted.tensor):
        return
    claims = []
    for one in asked:
        said = [(place, sides) for place in wanted.places if (sides := _sides(one.step, place))]
        if not said:
            continue
        why = one.kept_off([place for place, _ in said]) if one.patterns else None
        for side, value in () if why else (pair for _, sides in said for pair in sides):
            if side == "dtype" and protected and (kept := _kept(wanted, value, protected)):
                why = kept
            else:
                claims.append((one.step.name, side, value))
        if why:
            wanted.off = {**wanted.off, one.step.name: why}
    wanted.wants, wanted.by, disagreements = _merge(tuple(claims))
    for wrong in disagreements:
        remedy = "drop one step, or exclude the module"
        yield Problem(wanted.places[0].path, wrong, remedy)


def _kept(wanted: Wanted, dtype: str, protected: Protected) -> str | None:
    """Whose code keeps any of the objects that are this tensor out of `dtype`, or None."""
    return next((why for each in wanted.tensors if (why := protected.reason(each, dtype))), None)


@lru_cache(maxsize=4096)  # nearly all tensors of a model are wanted in one of a few ways
def _merge(
    claims: tuple[tuple[str, str, str], ...],
) -> tuple[Mapping[str, str], Mapping[str, tuple[str, ...]], tuple[str, ...]]:
    """What is wanted by all together, by whom, and what they disagree about."""
    wants: dict[str, str] = {}
    by: dict[str, tuple[str, ...]] = {}
    wrong = []
    for step, side, value in claims:
        if wants.setdefault(side, value) != value:
            wrong.append(f"{by[side][0]} wants {wants[side]}, and {step} wants {value}")
        if step not in by.get(side, ()):
            by[side] = (*by.get(side, ()), step)
    return wants, by, tuple(wrong)


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


def _without_effect(
    model: nn.Module, steps: Sequence[TensorStep], tensors: list[Wanted]
) -> Iterable[ConfigError]:
    """All memory-format steps are one request, which has no effect only if none matched anything."""
    formats = [step for step in steps if hasattr(step, "memory_format")]
    if formats and not any("memory_format" in wanted.wants for wanted in tensors):
        where = ", ".join(f"steps.{step.name}" for step in formats)
        meanings = dict.fromkeys(step.nothing_matched(model) for step in formats)
        yield NothingMatchesError(where, "; ".join(meanings))
