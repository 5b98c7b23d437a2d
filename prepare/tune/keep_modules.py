"""Correct a 16-bit recipe whose verification failed: keep modules in float32, and say what each costs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING

from prepare.core.utils.text import plural
from prepare.patterns import NORMS, exactly
from prepare.tune.candidates import Candidate
from prepare.tune.compare_candidates import CandidateError, CheckResult
from prepare.tune.module_errors import ModuleError, worth_keeping
from prepare.tune.records import KeptModule

if TYPE_CHECKING:
    from prepare.bench.variant import Clock
    from prepare.core.utils.progress import Stage
    from prepare.tune.candidate_run import PreparedCandidate

# The parts of the time for the search, and for measuring what each module costs.
_SEARCH_PART, _COST_PART = 0.8, 0.2
# Pairs of calls, with and without a module in float32, that its cost is the median of.
_PAIRS = 5
# Verifies the recipe with these modules kept.
Attempt = Callable[[tuple[str, ...]], CheckResult]


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
    _kept: dict[str, tuple[KeptModule, ...]] = field(default_factory=dict)
    _reasons: dict[str, str] = field(default_factory=dict)

    def may_help(self, checked: CheckResult) -> bool:
        """Return whether the results were wrong, or have an error that is too large to judge."""
        return checked.status == "fail" or (checked.status != "pass" and checked.error is not None)

    def __call__(self, candidate: Candidate, seconds: float) -> Corrected | None:
        """Return the recipe with the modules kept that its dtype needs; None if it is not in 16 bits."""
        if candidate.precision is None:
            return None
        key, checked = json.dumps(candidate.part("precision")), None
        if key not in self._reasons:
            checked = self._search(candidate, key, seconds)
        kept = self._kept.get(key, ())
        names = tuple(each.module for each in kept)
        twin = keeping(candidate, names) if kept else None
        return Corrected(twin, self._reasons[key], kept, checked)

    def _search(self, candidate: Candidate, key: str, seconds: float) -> CheckResult | None:
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
        found = KeepSearch(worth_keeping(errors), attempt, has_time).run()
        if found.modules is None:
            self._reasons[key] = (
                "no set of modules in float32 makes it right"
                if found.is_complete and can_measure
                else "no time was left to find the modules that have to stay in float32"
            )
            return None
        costs = self._costs(candidate, found.modules, _COST_PART * seconds)
        self._kept[key] = tuple(
            KeptModule(module, _finite(errors[module].low), errors[module].kept, cost)
            for module, cost in zip(found.modules, costs, strict=True)
        )
        self._reasons[key] = _success(found)
        return found.checked

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


def _success(found: Search) -> str:
    modules = ", ".join(found.modules or ())
    fewest = "" if found.is_complete else "; no time was left to try fewer"
    return f"it is right with {modules} in float32{fewest}"


def _finite(error: float) -> float | None:
    return error if math.isfinite(error) else None


@dataclass(frozen=True, slots=True)
class Search:
    """The end of a search: the modules to keep, or None, and their verification.

    `is_complete` is False if the time was over: then fewer modules, or others, may be enough.
    """

    modules: tuple[str, ...] | None
    checked: CheckResult | None
    is_complete: bool


class KeepSearch:
    """Keep the modules in `order` one after the other until the recipe passes; then try without each.

    The number of kept modules is doubled, and halved between the last one that fails and the first one that
    passes. `has_time` says whether one more attempt may begin.
    """

    def __init__(
        self, order: Sequence[str], attempt: Attempt, has_time: Callable[[], bool]
    ) -> None:
        self._order, self._attempt, self._has_time = tuple(order), attempt, has_time
        self._best: tuple[tuple[str, ...], CheckResult] | None = None
        self._in_time = True

    def run(self) -> Search:
        """Run the search. That no module is kept is known to fail."""
        few, many = 0, min(1, len(self._order))
        while many and not self._passes(self._order[:many]):
            few, many = many, min(2 * many, len(self._order))
            if few == many or not self._in_time:
                return Search(None, None, self._in_time)
        while self._in_time and few + 1 < many:
            middle = (few + many) // 2
            few, many = (few, middle) if self._passes(self._order[:middle]) else (middle, many)
        if self._best is None:
            return Search(None, None, self._in_time)
        # The last one of the best set is needed: without it the set failed.
        for module in reversed(self._best[0]):
            fewer = tuple(each for each in self._best[0] if each != module)
            if fewer and module != self._order[many - 1]:
                self._passes(fewer)
        return Search(*self._best, self._in_time)

    def _passes(self, modules: tuple[str, ...]) -> bool:
        modules = _outermost(modules)
        if not self._in_time or not self._has_time():
            self._in_time = False
            return False
        checked = self._attempt(modules)
        if checked.status != "pass":
            return False
        self._best = modules, checked
        return True


def _outermost(modules: tuple[str, ...]) -> tuple[str, ...]:
    """Leave out the modules inside others: these are kept anyway."""
    return tuple(
        each for each in modules if not any(each.startswith(f"{other}.") for other in modules)
    )
