"""Ask the steps of a pipeline what they want of every tensor, and which modules they target."""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import cache, lru_cache

import torch
from torch import nn

from prepare.core.model.forward_overrides import Protected
from prepare.core.model.memory_format import FORMATS, takes
from prepare.core.model.tensors import (
    NamedTensor,
    identity,
    is_expanded,
    is_lazy,
    is_plain,
    named_tensors,
    storage_key,
)
from prepare.errors import (
    ConfigError,
    ConflictError,
    NothingMatchesError,
    PatternError,
    Problem,
    StepError,
)
from prepare.patterns import NORMS, kept_modules, matches, near_misses, patterns_in
from prepare.pipeline.tensor_table import RequestTable, StorageGroup, TensorRequest
from prepare.step import ModuleStep, Step, TensorStep, Want

_OPTIONS = ("include", "exclude", "keep")


def make_table(model: nn.Module, steps: Sequence[TensorStep]) -> RequestTable:
    """Ask every step for every tensor of `model`, and merge the answers.

    Raises:
        ConflictError: two steps want different things of one tensor; holds all such pairs.
        StepError: a step raised, or wants what a tensor cannot have.
    """
    requests, shared = _requests(named_tensors(model))
    selections = [_Selection(step, model) for step in steps]
    protected = Protected(model)
    conflicts = [p for request in requests for p in _fill(request, steps, selections, protected)]
    if conflicts:
        raise ConflictError.of(conflicts)
    unmatched = (error for selection in selections for error in selection.unmatched_patterns())
    errors: list[ConfigError] = list(unmatched)
    formats = format_steps(steps, model)
    asked = [step for step in steps if step.name in formats]
    # All memory-format steps of a pipeline are one request.
    if asked and not any("memory_format" in request.wants for request in requests):
        where = ", ".join(f"steps.{step.name}" for step in asked)
        meanings = dict.fromkeys(step.nothing_matched(model) for step in asked)
        errors.append(NothingMatchesError(where, "; ".join(meanings)))
    return RequestTable(requests, errors, shared)


def format_steps(
    steps: Iterable[Step], model: nn.Module | None = None
) -> dict[str, Mapping[int, str]]:
    """Return the steps that request a memory format for convolutions, with the format for each rank.

    With a `model` also those that want one of its convolutions only.
    """
    requested = {step.name: step.formats(model) for step in steps if isinstance(step, TensorStep)}
    return {name: formats for name, formats in requested.items() if formats}


def _requests(places: Iterable[NamedTensor]) -> tuple[list[TensorRequest], list[StorageGroup]]:
    """Return a request for each tensor, with all its places, and those that share a storage."""
    by_storage: dict[Hashable, list[NamedTensor]] = {}
    for place in places:
        storage = storage_key(place.tensor)
        by_storage.setdefault(-id(place.tensor) if storage is None else storage, []).append(place)
    requests, shared = [], []
    for same in by_storage.values():
        tensor = same[0].tensor
        group = [TensorRequest(tensor, same)]
        if len(same) > 1 and any(place.tensor is not tensor for place in same):
            views: dict[Hashable, list[NamedTensor]] = {}
            for place in same:
                views.setdefault(identity(place.tensor), []).append(place)
            group = [TensorRequest(each[0].tensor, each) for each in views.values()]
        requests += group
        if is_plain(tensor) and (len(group) > 1 or is_expanded(tensor)):
            shared.append(StorageGroup(group))
    return requests, shared


def targets(model: nn.Module, step: ModuleStep) -> tuple[tuple[str, ...], list[ConfigError]]:
    """Return the names of the modules that `step` still has to change, and its unmatched patterns.

    An exclusion under one name of a module holds for all its names.
    """
    selection = _Selection(step, model)
    if not selection.patterns:
        return tuple(step.targets(model)), []
    modules = dict(model.named_modules(remove_duplicate=False))
    skipped = {id(modules[n]) for n in step.candidates(model) if selection.reason(n, modules[n])}
    names = tuple(name for name in step.targets(model) if id(modules[name]) not in skipped)
    return names, list(selection.unmatched_patterns())


class _Selection:
    """The modules that the patterns of one step select, and a record of the patterns that matched.

    A module that `keep` matches is kept with all modules in it.
    """

    def __init__(self, step: TensorStep | ModuleStep, model: nn.Module) -> None:
        self.step, self.model = step, model
        self.candidates: dict[str, nn.Module] = {}
        self.patterns = {each: found for each in _OPTIONS if (found := patterns_in(step, each))}
        self._kept = kept_modules(model, patterns_in(step, "keep"))
        self._reasons: dict[str, str | None] = {}
        self._matched: set[tuple[str, str]] = set()

    def reason_for(self, places: Sequence[NamedTensor]) -> str | None:
        """Return why a pattern keeps the step off a tensor, or None.

        An exclusion in one of its places holds in all: it is the same tensor.
        """
        # Check every place, so that a pattern that matches only a later one counts as matched.
        reasons = [(self.reason(p.module_name, p.module), p.path) for p in places]
        for reason, path in reasons:
            if reason:
                return f"{reason} (as {path})" if len(places) > 1 else reason
        return None

    def reason(self, name: str, module: nn.Module) -> str | None:
        """Return why a pattern keeps the step off a module, or None."""
        if name not in self._reasons:
            self.candidates[name] = module
            self._reasons[name] = self._match(name, module)
        return self._reasons[name]

    def _match(self, name: str, module: nn.Module) -> str | None:
        first = {"keep": self._kept[name]} if name in self._kept else {}
        for option in ("include", "exclude"):
            for pattern in self.patterns.get(option, ()):
                if matches(pattern, name, module):
                    self._matched.add((option, pattern))
                    first.setdefault(option, pattern)
        for option in ("exclude", "keep"):
            if option in first:
                return f"{option}: {first[option]}"
        is_outside = "include" in self.patterns and "include" not in first
        return "include: no pattern matches" if is_outside else None

    def unmatched_patterns(self) -> Iterable[ConfigError]:
        """Yield an error for every pattern that matched nothing; `norms` may match nothing.

        `keep` may match any module: one without tensors computes in 16 bits too.
        """
        pairs = [(option, each) for option, those in self.patterns.items() for each in those]
        for option, pattern in pairs:
            if pattern == NORMS or (option, pattern) in self._matched:
                continue
            modules, kind = self.candidates, f"module that {self.step.name} prepares"
            if option == "keep":
                modules = dict(self.model.named_modules(remove_duplicate=False))
                kind = f"module of {type(self.model).__name__}"
                if any(matches(pattern, name, module) for name, module in modules.items()):
                    continue
            where, wrong = f"steps.{self.step.name}.{option}", f"{pattern!r} matches no {kind}"
            yield PatternError(where, wrong, near_misses(pattern, modules))


def _fill(
    request: TensorRequest,
    steps: Sequence[TensorStep],
    selections: list[_Selection],
    protected: Protected,
) -> Iterable[Problem]:
    """Write what the steps want into `request`; yield the conflicts between them."""
    claims: list[tuple[str, str, str]] = []
    if is_lazy(request.tensor):
        return
    for step, selection in zip(steps, selections, strict=True):
        answers = [(place, want) for place in request.places if (want := _ask(step, place))]
        if not answers:
            continue
        places = [place for place, _ in answers]
        skipped = selection.reason_for(places) if selection.patterns else None
        for side, value in () if skipped else [pair for _, want in answers for pair in want]:
            if side == "clamp":  # it says how to cast, and is no property of the tensor
                request.clamp = True
            elif side == "dtype" and protected and (kept := _protection(request, value, protected)):
                skipped = kept
            else:
                claims.append((step.name, side, value))
        if skipped:
            request.skipped = {**request.skipped, step.name: skipped}
    if claims:
        request.wants, request.by, conflicts = _merge(tuple(claims))
        for conflict in conflicts:
            yield Problem(request.path, conflict, "drop one step, or exclude the module")


def _protection(request: TensorRequest, dtype: str, protected: Protected) -> str | None:
    """Return which module's own code keeps the tensor out of `dtype`, or None."""
    reasons = (protected.reason(tensor, dtype) for tensor in request.tensors)
    return next((reason for reason in reasons if reason), None)


@lru_cache(maxsize=4096)  # most tensors of a model are requested in one of a few ways
def _merge(
    claims: tuple[tuple[str, str, str], ...],
) -> tuple[Mapping[str, str], Mapping[str, tuple[str, ...]], tuple[str, ...]]:
    """Merge (step, property, value) claims: return the values, the steps behind each, the conflicts."""
    wants: dict[str, str] = {}
    by: dict[str, tuple[str, ...]] = {}
    conflicts = []
    for step, side, value in claims:
        if wants.setdefault(side, value) != value:
            conflicts.append(f"{by[side][0]} wants {wants[side]}, and {step} wants {value}")
        if step not in by.get(side, ()):
            by[side] = (*by.get(side, ()), step)
    return wants, by, tuple(conflicts)


def _ask(step: TensorStep, place: NamedTensor) -> tuple[tuple[str, str], ...]:
    """Return what `step` wants of this tensor as (property, value) pairs, checked."""
    where = f"steps.{step.name}"
    try:
        want = step.want(place)
    except Exception as error:
        wrong = f"want() raised on {place.path}: {type(error).__name__}: {error}"
        raise StepError(where, wrong) from error
    if want is None:
        return ()
    if not isinstance(want, Want):
        raise StepError(where, f"want() returned {want!r}", "return a Want or None")
    try:
        pairs = _checked_pairs(want.device, want.dtype, want.memory_format, place.tensor.dim())
    except ValueError as error:
        raise StepError(where, f"want() for {place.path} returned {error}") from None
    return (*pairs, ("clamp", "")) if want.clamp else pairs


@cache
def _checked_pairs(
    device: str | None, dtype: str | None, memory_format: str | None, rank: int
) -> tuple[tuple[str, str], ...]:
    if memory_format is not None and memory_format not in FORMATS:
        raise ValueError(f"the memory format {memory_format!r}, which is not one of {FORMATS}")
    if memory_format is not None and not takes(memory_format, rank):
        raise ValueError(f"{memory_format} for a tensor of {rank} dimensions")
    if dtype is not None and not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise ValueError(f"the dtype {dtype!r}, which torch does not have")
    sides = (("device", device), ("dtype", dtype), ("memory_format", memory_format))
    return tuple((side, value) for side, value in sides if value is not None)
