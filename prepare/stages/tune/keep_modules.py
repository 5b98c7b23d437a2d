"""Correct a 16-bit recipe whose verification failed: keep modules in float32, and say what each costs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from prepare.core.forward.call import Call, call_of
from prepare.core.forward.nested import map_tensors, tensors_in
from prepare.core.forward.torch_state import isolated
from prepare.core.utils.numbers import finite
from prepare.core.utils.signals import held_interrupts, interruptible
from prepare.core.utils.text import plural
from prepare.errors import RefusedError
from prepare.patterns import NORMS, exactly
from prepare.pipeline import Pipeline
from prepare.stages.tune.candidates import Candidate
from prepare.stages.tune.compare_candidates import CandidateError, CheckResult
from prepare.stages.tune.records import KeptModule, Steps
from prepare.stages.verify.module_calls import CallInterceptor, largest_error
from prepare.stages.verify.same_numbers import SameNumbers, make_deterministic, training_flags

if TYPE_CHECKING:
    from prepare.core.utils.progress import Stage
    from prepare.stages.bench.variant import Clock
    from prepare.stages.tune.candidate_run import PreparedCandidate

# The parts of the time for the search, and for measuring what each module costs.
_SEARCH_PART, _COST_PART = 0.8, 0.2
# Pairs of calls, with and without a module in float32, that its cost is the median of.
_PAIRS = 5
# A module is worth keeping if its error is by this factor larger than that of the casts around it.
_WORTHWHILE = 1.1
# The modules in a module explain its error if one of them has as much, up to this factor.
_EXPLAINED = 1.5
# Of a search: a sentence, the modules to keep, and the verification with them.
_Found = tuple[str, tuple[KeptModule, ...], CheckResult | None]
# Verifies the recipe with these modules kept.
Attempt = Callable[[tuple[str, ...]], CheckResult]


@dataclass(frozen=True, slots=True)
class ModuleError:
    """The largest errors of a module's results, as fractions of their scale.

    `low` is its error in 16 bits, and `kept` that in float32 with its arguments and results in 16 bits.
    """

    low: float = 0.0
    kept: float = 0.0

    @property
    def gain(self) -> float:
        """The error that keeping the module in float32 avoids; 0 if nearly all of it stays."""
        return self.low - self.kept if self.low > _WORTHWHILE * self.kept else 0.0


@dataclass(frozen=True, slots=True)
class Corrected:
    """The recipe with modules kept, or None; its verification, if it ran; and a sentence on the search."""

    candidate: Candidate | None
    reason: str
    kept: tuple[KeptModule, ...] = ()
    checked: CheckResult | None = None


@dataclass
class KeepInFloat32:
    """Keep the fewest modules in float32; one search for each 16-bit dtype, since layouts change little.

    `measure` returns the error of each module in the candidate's dtype, `start` prepares a candidate and
    `check` verifies one.
    """

    measure: Callable[[Candidate], Mapping[str, ModuleError]]
    start: Callable[[Candidate], PreparedCandidate]
    check: Callable[[Candidate, PreparedCandidate], CheckResult]
    clock: Clock
    progress: Stage
    # By the dtype and its options.
    _found: dict[str, _Found] = field(default_factory=dict)

    def may_help(self, checked: CheckResult) -> bool:
        """Return whether the results were wrong, or have an error that is too large to judge."""
        return checked.status == "fail" or (checked.status != "pass" and checked.error is not None)

    def __call__(self, candidate: Candidate, seconds: float) -> Corrected | None:
        """Return the recipe with the modules kept that its dtype needs; None if it is not in 16 bits."""
        if candidate.precision is None:
            return None
        key = json.dumps(candidate.part("precision"))
        known = key in self._found
        if not known:
            self._found[key] = self._search(candidate, seconds)
        reason, kept, checked = self._found[key]
        names = tuple(each.module for each in kept)
        twin = keeping(candidate, names) if kept else None
        return Corrected(twin, reason, kept, None if known else checked)

    def _search(self, candidate: Candidate, seconds: float) -> _Found:
        began, longest = self.clock(), 0.0
        dtype = candidate.precision

        def has_time() -> bool:
            return self.clock() + longest - began < _SEARCH_PART * seconds

        def attempt(modules: tuple[str, ...]) -> CheckResult:
            nonlocal longest
            start, tried = self.clock(), keeping(candidate, modules)
            with self.progress(f"verifying {tried.name}"):
                try:
                    checked = self.check(tried, self.start(tried))
                except CandidateError as error:
                    checked = CheckResult("cannot tell", str(error))
            longest = max(longest, self.clock() - start)
            return checked

        errors: Mapping[str, ModuleError] = {}
        if can_measure := has_time():
            with self.progress(f"measuring the error of each module in {dtype}"):
                errors = self.measure(candidate)
        search = search_fewest(worth_keeping(errors), attempt, has_time)
        if search.modules is None:
            none = "no set of modules in float32 makes it right"
            late = "no time was left to find the modules that have to stay in float32"
            return none if search.is_complete and can_measure else late, (), None
        costs = self._costs(candidate, search.modules, _COST_PART * seconds)
        kept = tuple(
            KeptModule(module, finite(errors[module].low), errors[module].kept, cost)
            for module, cost in zip(search.modules, costs, strict=True)
        )
        modules, fewest = ", ".join(search.modules), "; no time was left to try fewer"
        reason = f"it is right with {modules} in float32{'' if search.is_complete else fewest}"
        return reason, kept, search.checked

    def _costs(
        self, candidate: Candidate, modules: tuple[str, ...], seconds: float
    ) -> list[float | None]:
        """Return the time of a call with all modules kept, relative to that without each one of them."""
        began, costs = self.clock(), list[float | None]()
        try:
            with_all = self.start(keeping(candidate, modules))
            for module in modules:
                if self.clock() - began > seconds:
                    break
                fewer = tuple(each for each in modules if each != module)
                with self.progress(f"timing what {module} costs in float32"):
                    without = self.start(keeping(candidate, fewer))
                    ratios = [with_all.turn(n) / max(without.turn(n), 1e-9) for n in range(_PAIRS)]
                costs.append(median(ratios))
        except CandidateError:  # it ran before; without its time the result is still right
            pass
        return [*costs, *[None] * (len(modules) - len(costs))]


def keeping(candidate: Candidate, modules: tuple[str, ...]) -> Candidate:
    """Return the candidate with these modules kept in float32 too."""
    if not modules:
        return candidate
    ((name, half),) = candidate.part("precision").items()
    before = [NORMS] if half["keep"] == NORMS else list(half["keep"])
    keep = [*before, *map(exactly, modules)]
    what = modules[0] if len(modules) == 1 else f"in {plural(len(modules), 'module')}"
    steps = {**candidate.steps, name: {**half, "keep": keep}}
    return Candidate(f"{candidate.name} + float32 {what}", steps)


@dataclass(frozen=True, slots=True)
class Search:
    """The end of a search: the modules to keep, or None, and their verification.

    `is_complete` is False if the time was over: then fewer modules, or others, may be enough.
    """

    modules: tuple[str, ...] | None
    checked: CheckResult | None
    is_complete: bool


def search_fewest(order: Sequence[str], attempt: Attempt, has_time: Callable[[], bool]) -> Search:
    """Keep the modules in `order` one after the other until the recipe passes; then try without each.

    The number of kept modules is doubled, and halved between the last one that fails and the first one that
    passes. `has_time` says whether one more attempt may begin. That no module is kept is known to fail.
    """
    passed: list[tuple[tuple[str, ...], CheckResult]] = []
    in_time = True

    def passes(modules: Sequence[str]) -> bool:
        nonlocal in_time
        in_time = in_time and has_time()
        if not in_time:
            return False
        kept = _outermost(tuple(modules))
        checked = attempt(kept)
        if checked.status == "pass":
            passed.append((kept, checked))
        return checked.status == "pass"

    few, many = 0, min(1, len(order))
    while many and not passes(order[:many]):
        few, many = many, min(2 * many, len(order))
        if few == many or not in_time:
            return Search(None, None, in_time)
    while in_time and few + 1 < many:
        middle = (few + many) // 2
        few, many = (few, middle) if passes(order[:middle]) else (middle, many)
    if not passed:
        return Search(None, None, in_time)
    # The last one of the best set is needed: without it the set failed.
    for module in reversed(passed[-1][0]):
        fewer = tuple(each for each in passed[-1][0] if each != module)
        if fewer and module != order[many - 1]:
            passes(fewer)
    return Search(*passed[-1], in_time)


def _outermost(modules: tuple[str, ...]) -> tuple[str, ...]:
    """Leave out the modules inside others: these are kept anyway."""
    return tuple(
        each for each in modules if not any(each.startswith(f"{other}.") for other in modules)
    )


def errors_of(
    steps: Steps, copied: Callable[[], nn.Module], batch: Any, *, mode: str
) -> dict[str, ModuleError]:
    """Return the error of each module in the dtype of `half` in `steps`, on copies of the model."""
    device: Steps = {name: options for name, options in steps.items() if name == "device"}
    dtype = getattr(torch, steps["half"]["dtype"])
    reference, low = (
        Pipeline.from_config(device).apply(copied(), strict=False, known_issues="ignore")
        for _ in range(2)
    )
    try:
        half = Pipeline.from_config({"half": steps["half"]})
        half.apply(low, strict=False, known_issues="ignore")
    except RefusedError:  # a weight overflows in this dtype
        low.to(dtype)
    return measure_modules(reference, low, batch, dtype=dtype, mode=mode)


def measure_modules(
    reference: nn.Module, low: nn.Module, batch: Any, *, dtype: torch.dtype, mode: str
) -> dict[str, ModuleError]:
    """Run `reference` once, and each of its modules again: in `low`, the same model in `dtype`, and kept.

    Both models are copies that may be changed. A module that raises in `dtype` has an infinite error; one
    that does not run alone in float32 either is left out.
    """
    for model in (reference, low):
        make_deterministic(model, training_flags(model, mode))
    low_modules, call = dict(low.named_modules()), call_of(batch)
    names = {id(module): name for name, module in reference.named_modules() if name in low_modules}
    errors: dict[str, ModuleError] = {}

    def rounded(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor.clone()

    def exact(tensor: Tensor) -> Tensor:
        return tensor.to(torch.float32) if tensor.dtype == dtype else tensor.clone()

    def measure(name: str, module: nn.Module, arguments: Call, output: Any) -> None:
        expected = [tensor.clone() for tensor in tensors_in(output)]

        def error_of(result: Any) -> float:
            return largest_error(zip(expected, tensors_in(result), strict=True))

        kept = map_tensors(rounded, _called(module, arguments.map(exact)))
        error = ModuleError(math.inf, error_of(kept))
        with suppress(Exception):  # no kernel in 16 bits, or float32 tensors of its own
            in_low = _called(low_modules[name], arguments.map(torch.clone))
            error = replace(error, low=error_of(in_low))
        before = errors.get(name, ModuleError())
        errors[name] = ModuleError(max(before.low, error.low), max(before.kept, error.kept))

    def handle(run: Callable[[], Any], module: nn.Module, arguments: Call) -> Any:
        name = names.get(id(module))
        if not name:
            return run()
        # Rounded copies: the module may change its arguments in place.
        copied, output = arguments.map(rounded), run()
        interceptor.handle = None
        with suppress(Exception):  # code of the model that does not run alone
            measure(name, module, copied, output)
        interceptor.handle = handle
        return output

    interceptor = CallInterceptor()
    interceptor.handle = handle
    with held_interrupts(), isolated(), torch.no_grad(), SameNumbers(), interceptor:
        interruptible(_called, reference, call)
    return errors


def worth_keeping(errors: Mapping[str, ModuleError]) -> list[str]:
    """Return the modules that lose precision in 16 bits and not in float32, the largest error first.

    A module whose error is that of one module in it comes after all others.
    """
    gains = {name: error.gain for name, error in errors.items() if error.gain}

    def is_explained(name: str) -> bool:
        inside = (gains[other] for other in gains if other.startswith(f"{name}."))
        return gains[name] <= _EXPLAINED * max(inside, default=0.0)

    return sorted(gains, key=lambda name: (is_explained(name), -gains[name]))


def _called(module: nn.Module, call: Call) -> Any:
    return module(*call.args, **call.kwargs)
