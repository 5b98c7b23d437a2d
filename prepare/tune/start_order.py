"""The order in which candidates are started: by precision first, compilers last."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prepare.tune.compare_candidates import Contestant, Standings

# There has to be time for so many rounds before another contestant is started.
_WORTHWHILE_ROUNDS = 3


@dataclass(slots=True)
class StartOrder:
    """Chooses the next contestant to start.

    `compile_seconds` of the budget are reserved while a candidate with a compiler waits: only the first
    candidate in each precision may use them. `longest_compilation` is the longest start so far.
    """

    standings: Standings
    compile_seconds: float
    longest_compilation: float = 0.0

    def next(self, left: float) -> Contestant | None:
        """Return the contestant to start if there is room, with `left` seconds of the budget left."""
        waiting = self.standings.waiting()
        eager = [each for each in waiting if not each.candidate.compiles]
        compiled = [each for each in waiting if each.candidate.compiles]
        reserved = self.compile_seconds if compiled else 0.0
        first = self._first_in_precision(eager)
        nothing_runs = len(self.standings.running()) == 2
        if eager and (nothing_runs or self._has_time(left - reserved)):
            return first or eager[0]
        if first and self._has_time(left):
            return first
        if compiled and (self.standings.is_clear() or left <= reserved):
            fits = self._has_time(left - self.longest_compilation)
            return min(compiled, key=self._compile_order) if fits else None
        return None

    def round_seconds(self) -> float:
        """Return the seconds of a round, about."""
        return sum(each.seconds for each in self.standings.running())

    def _first_in_precision(self, eager: list[Contestant]) -> Contestant | None:
        """Return the first contestant in a precision that was not tried without a compiler."""
        tried = {
            each.candidate.precision
            for each in self.standings.contestants[1:]
            if not each.candidate.compiles and (each.runner or each.status)
        }
        return next((each for each in eager if each.candidate.precision not in tried), None)

    def _has_time(self, left: float) -> bool:
        """Return whether enough rounds with one more contestant fit into `left` seconds."""
        return _WORTHWHILE_ROUNDS * (self.round_seconds() + self.standings.base.seconds) < left

    def _compile_order(self, contestant: Contestant) -> tuple[float, int, float]:
        """Return a key by which contestants with a compiler are started, the lowest first.

        Each compiler is tried once, on the recipe that is fastest without it, in the order of these
        candidates; then the fastest compiler is tried on the other recipes.
        """
        standings, compiler = self.standings, contestant.candidate.compiler
        same = [each for each in standings.contestants if each.candidate.compiler == compiler]
        tried = [standings.speed(each) for each in same if each.runner or each.status]
        place = standings.contestants.index(min(same, key=self._eager_speed))
        return min(tried, default=0.0), place, self._eager_speed(contestant)

    def _eager_speed(self, contestant: Contestant) -> float:
        """Return the speed of the same recipe without a compiler, 1 if unknown."""
        eager_twins = (
            each
            for each in self.standings.contestants
            if each.candidate.eager == contestant.candidate.eager
            and each.times
            and not each.candidate.compiles
        )
        return next(map(self.standings.speed, eager_twins), 1.0)
