"""Ask the steps what they want of every tensor: one table, from which the moves and the plan follow."""

from collections import ChainMap
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from prepare.core.model.forward_overrides import Protected, computed_tensors
from prepare.core.model.memory_format import FORMATS, canonical_stride, satisfied, takes
from prepare.core.model.tensors import (
    NamedTensor,
    identity,
    is_expanded,
    is_lazy,
    is_plain,
    is_strided,
    name_of,
    named_tensors,
    storage_key,
    stored_bytes,
)
from prepare.errors import (
    ConfigError,
    ConflictError,
    NothingMatchesError,
    PatternError,
    Problem,
    StepError,
)
from prepare.patterns import (
    NORMS,
    declared_float32,
    kept_modules,
    matches,
    near_misses,
    patterns_in,
)
from prepare.pipeline.plan import State, TensorPlan, state
from prepare.pipeline.transfer import Move
from prepare.step import ModuleStep, Step, TensorStep, Want

_OPTIONS = ("include", "exclude", "keep")


@dataclass(slots=True)
class TensorRequest:
    """One tensor, every place that holds it in the model, and what the steps request of it.

    `wants` maps each property (device, dtype, memory_format) to the requested value, and `by` to the
    steps that request it; `skipped` maps each step that is kept off this tensor to the reason. With
    `clamp`, values beyond the range of the new dtype are clamped.
    """

    tensor: Tensor
    places: list[NamedTensor]
    wants: Mapping[str, str] = field(default_factory=dict)
    by: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    skipped: Mapping[str, str] = field(default_factory=dict)
    clamp: bool = False
    _moves: list[Move | None] = field(default_factory=list)

    @property
    def path(self) -> str:
        """The dotted name of the first place that holds the tensor."""
        return self.places[0].path

    @property
    def tensors(self) -> list[Tensor]:
        """The Python objects of this tensor: one, or several Parameters over one storage."""
        if len(self.places) == 1:
            return [self.tensor]
        return list({id(place.tensor): place.tensor for place in self.places}.values())

    def move(self) -> Move | None:
        """Return the move that fulfils the request, found once; None if the tensor is as requested."""
        if not self._moves:
            self._moves.append(self._move() if self.wants else None)
        return self._moves[0]

    def _move(self) -> Move | None:
        wants, tensor = self.wants, self.tensor
        device = _device(wants["device"], tensor.device) if "device" in wants else tensor.device
        dtype = getattr(torch, wants["dtype"]) if "dtype" in wants else tensor.dtype
        same = device == tensor.device and dtype == tensor.dtype
        stride: tuple[int, ...] | None
        if not is_strided(tensor):
            stride = None
        elif "memory_format" in wants:
            stride = canonical_stride(tensor.shape, wants["memory_format"])
            same = same and stride == tensor.stride()
        else:
            stride = None if same else preserved_stride(tensor)
        return None if same else Move(self.path, self.tensors, device, dtype, stride, self.clamp)


# Tensors that are different views of one storage, or one tensor that is expanded over its own.
StorageGroup = list[TensorRequest]


def must_separate(group: StorageGroup) -> bool:
    """Return whether requests can be fulfilled only by giving the views storages of their own."""
    kinds: set[Any] = set()
    for request in group:
        tensor, move = request.tensor, request.move()
        kept = move and move.stride == tensor.stride()
        kinds.add(move and (move.device, move.dtype, tensor.dtype, kept))
    together = len(kinds) == 1 and all(kind is None or kind[-1] for kind in kinds)
    return len(group) > 1 and not together


def _move_of(group: StorageGroup) -> Move | None:
    """Return one move for all tensors of a group, or None if nothing changes."""
    move = next((move for request in group if (move := request.move())), None)
    if move is None or move.stride != group[0].tensor.stride():
        return move  # an expanded tensor that gets new strides
    named = [(request.path, tensor) for request in group for tensor in request.tensors]
    paths, tensors = zip(*named, strict=True)
    clamp = any(request.clamp for request in group)
    return Move(move.path, tensors, move.device, move.dtype, (1,), clamp, paths)


@dataclass(frozen=True)
class RequestTable:
    """The request for every tensor of a model, and the requests that have no effect, as errors.

    `shared` are the groups of tensors that share storage with others, or that overlap themselves.
    """

    requests: list[TensorRequest]
    errors: list[ConfigError]
    shared: list[StorageGroup]

    def moves(self) -> list[Move]:
        """Return all moves: one for each tensor, but one for all views of a storage."""
        grouped = {id(request) for group in self.shared for request in group}
        single = (request.move() for request in self.requests if id(request) not in grouped)
        return [move for move in (*single, *map(_move_of, self.shared)) if move]


def preserved_stride(tensor: Tensor) -> tuple[int, ...]:
    """Return the strides that a cast or a device move keeps, as `Tensor.to` does for dense tensors.

    An expanded tensor stays expanded, where `Tensor.to` would write it out in full.
    """
    if satisfied(tensor.shape, tensor.stride()) or is_expanded(tensor):
        return tensor.stride()
    return torch.empty_like(tensor, device="meta").stride()


def tensor_plans(table: RequestTable) -> list[TensorPlan]:
    """Return a row for every place that holds a tensor, and one for every computed weight, sorted."""
    plans = [plan for request in table.requests for plan in _stored_plans(request)]
    plans += _computed_plans(table)
    return sorted(plans, key=lambda plan: (plan.module, plan.tensor, plan.kind))


def _stored_plans(request: TensorRequest) -> Iterable[TensorPlan]:
    """Yield a row for every place that holds the tensor."""
    tensor, move, places = request.tensor, request.move(), request.places
    old = new = state(tensor)
    strided = old.stride is not None
    bytes_old = bytes_new = stored_bytes(tensor) if strided else 0
    if move:
        new = State(move.stride, name_of(move.dtype), name_of(move.device))
        bytes_new = tensor.numel() * move.dtype.itemsize if new.stride is not None else 0
    shape = tuple(tensor.shape) if strided else None
    wants, by, off = request.wants, request.by, request.skipped
    paths = sorted(place.path for place in places) if len(places) > 1 else ()
    for _, _, name, kind, _, owner, _ in places:
        shared = tuple(p for p in paths if p != (f"{owner}.{name}" if owner else name))
        # By position: a model can have ten thousand rows, and keywords add half of the time.
        yield TensorPlan(
            owner, name, kind, shape, old, new, wants, by, off, shared, bytes_old, bytes_new
        )


def _computed_plans(table: RequestTable) -> Iterable[TensorPlan]:
    """Yield a row for every computed weight, with the requests of the tensors that it is computed from.

    What cannot be computed has a message in place of a tensor, and no state.
    """
    held: dict[str, list[tuple[TensorRequest, NamedTensor]]] = {}
    for request in table.requests:
        for place in request.places:
            held.setdefault(place.module_name, []).append((request, place))
    for module, pairs in held.items():
        for name, tensor in computed_tensors(pairs[0][1].module).items():
            requests = [r for r, place in pairs if name in (place.name, place.computes)]
            # The first one counts.
            wants = dict(ChainMap(*({**r.wants} for r in requests)))
            by = dict(ChainMap(*({**r.by} for r in requests)))
            off = dict(ChainMap(*({**r.skipped} for r in requests)))
            now, shape = State(None, "", ""), None
            if isinstance(tensor, Tensor):
                now, shape = state(tensor), tuple(tensor.shape)
            yield TensorPlan(module, name, "computed", shape, now, now, wants, by, off)


@cache
def _device(name: str, current: torch.device) -> torch.device:
    """Return the device of that name; a tensor on cuda:1 already satisfies `cuda`."""
    device = torch.device(name)
    return current if device.index is None and device.type == current.type else device


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
    errors: list[ConfigError] = [each for s in selections for each in s.unmatched_patterns()]
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
            shared.append(group)
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
        self._declared = declared_float32(model) if "keep" in self.patterns else {}
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
        declared = (self._declared.get(id(place.tensor)) for place in places)
        return next((f"keep: {each}" for each in declared if each), None)

    def reason(self, name: str, module: nn.Module) -> str | None:
        """Return why a pattern keeps the step off a module, or None."""
        if name not in self._reasons:
            self.candidates[name] = module
            self._reasons[name] = self._match(name, module)
        return self._reasons[name]

    def _match(self, name: str, module: nn.Module) -> str | None:
        first = {"keep": self._kept[name]} if name in self._kept else {}
        for option in ("include", "exclude"):
            hits = [p for p in self.patterns.get(option, ()) if matches(p, name, module)]
            self._matched |= {(option, pattern) for pattern in hits}
            first |= {option: hits[0]} if hits else {}
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
        if (skipped or "").startswith("keep: "):
            wanted = [(p, want) for p in places if (want := _ask(step, p, step.want_of_kept))]
            if any(("dtype", name_of(place.tensor.dtype)) not in want for place, want in wanted):
                answers, skipped = wanted, None
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


def _ask(
    step: TensorStep, place: NamedTensor, ask: Callable[[NamedTensor], Want | None] | None = None
) -> tuple[tuple[str, str], ...]:
    """Return what `step` wants of this tensor as (property, value) pairs, checked."""
    where = f"steps.{step.name}"
    try:
        want = (ask or step.want)(place)
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
