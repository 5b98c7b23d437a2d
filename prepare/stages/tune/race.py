"""The race: time candidates in rounds, eliminate the slower ones, and verify the leaders."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prepare.core.utils.numbers import pace_text
from prepare.stages.bench import statistics
from prepare.stages.bench.rounds import Rounds
from prepare.stages.tune.compare_candidates import (
    CandidateError,
    CheckResult,
    Contestant,
    Standings,
)

if TYPE_CHECKING:
    from prepare.core.utils.text import Progress
    from prepare.stages.bench.variant import Clock
    from prepare.stages.tune.candidate_run import PreparedCandidate
    from prepare.stages.tune.candidates import Candidate

# Rounds between two eliminations: to test after each round would favour recipes that are fast by chance.
_ROUNDS_PER_BLOCK = 3
# The fraction of the budget that is reserved for recipes with a compiler, while one waits.
_COMPILE_PART = 0.6
# Verifications that do not pass are given back to the budget, up to this fraction of it.
_REFUND_PART = 0.5
# Eliminated recipes come back, so many at a time, when the race is clear; or when this part of its budget is
# left, if that is enough for so many rounds.
_FINALS_PART, _FINALISTS, _FINAL_ROUNDS = 0.5, 2, 40
# There has to be time for so many rounds before another contestant is started.
_WORTHWHILE_ROUNDS = 3


class Race:
    """One race; call `run` once.

    The first candidate is the unprepared model. It runs twice in every round, as the reference of the
    others and as their control, and needs no verification. `start` prepares a candidate and makes its
    first calls; `check` verifies one that runs. At most `capacity` candidates
    run at a time, but at least three.
    """

    def __init__(
        self,
        candidates: Sequence[Candidate],
        *,
        start: Callable[[Candidate], PreparedCandidate],
        check: Callable[[Candidate, PreparedCandidate], CheckResult],
        budget: float,
        clock: Clock,
        capacity: int = 1000,
        seed: int = 0,
        progress: Progress = lambda _: nullcontext(),
    ) -> None:
        self.contestants = [Contestant(candidate) for candidate in candidates]
        self.standings = Standings(self.contestants, Contestant(candidates[0]))
        self.rounds = Rounds(clock, seed)
        self._start, self._check, self._capacity = start, check, max(capacity, 3)
        self._budget, self._progress = budget, progress
        self._start_order = StartOrder(self.standings, budget * _COMPILE_PART)
        self._refundable = budget * _REFUND_PART

    def run(self) -> Contestant:
        """Run the race and return the winner: a recipe that passed its verification, or the unprepared model.

        Raises:
            CandidateError: the unprepared model itself does not run.
        """
        base, control = self.standings.base, self.standings.control
        self._enter(base)
        if base.status:
            raise CandidateError(base.reason)
        control.runner, control.seconds = base.runner, base.seconds
        while self._left() > 0:
            self._admit()
            if not self.standings.is_clear():
                if self._left() < _FINALS_PART * self._budget:
                    self._bring_back(_FINAL_ROUNDS)
                self._run_block()
                self._eliminate_slower()
            elif self._start_order.next(self._left()):
                self._settle()  # makes room
            elif self._passes(self.standings.simplest()) and not self._bring_back():
                break
        return self._conclude()

    def stop(self) -> Contestant:
        """End the race where it is; return the fastest recipe that is known to be right, or the base."""
        base = self.standings.base
        right = [each for each in self.standings.live() if each.checked and each.times]
        right = [each for each in right if each.checked and each.checked.status == "pass"]
        right = [each for each in right if self.standings.is_better(each)]
        winner = min(right, key=self.standings.speed, default=base)
        for each in self.contestants:
            if not each.status:
                self._eliminate(each, "not measured", "the tuning was stopped before its verdict")
        winner.status, winner.reason = "winner", self._win_reason(winner)
        return winner

    def _left(self) -> float:
        return self._budget - self.rounds.seconds()

    def _admit(self) -> None:
        """Start candidates while there is room and time; with a compiler, one at a time."""
        while len(self.standings.running()) - 1 < self._capacity:
            contestant = self._start_order.next(self._left())
            if contestant is None:
                return
            self._enter(contestant)
            if contestant.candidate.compiles and not contestant.status:
                return

    def _enter(self, contestant: Contestant) -> None:
        began = self.rounds.seconds()
        with self._progress(f"trying {contestant.name}; {self._state()}"):
            try:
                runner = self._start(contestant.candidate)
            except CandidateError as error:
                self._eliminate(contestant, "failed", str(error))
            else:
                contestant.runner = runner
                contestant.seconds = runner.seconds
                contestant.first_seconds = runner.first_seconds
        if contestant.candidate.compiles:
            order, took = self._start_order, self.rounds.seconds() - began
            order.longest_compilation = max(order.longest_compilation, took)
            self._extend_budget_for(contestant)

    def _extend_budget_for(self, contestant: Contestant) -> None:
        """Leave enough rounds to a contestant whose compilation or verification took long."""
        needed = statistics.min_values(self.standings.confidence) + 1 - len(contestant.counted())
        seconds = needed * self._start_order.round_seconds()
        self._budget = max(self._budget, self._budget - self._left() + seconds)

    def _run_block(self) -> None:
        live = len(self.standings.live())
        with self._progress(f"timing {live} recipes; {self._state()}"):
            for _ in range(_ROUNDS_PER_BLOCK):
                for contestant in self.rounds.turns(self.standings.running()):
                    self._turn(contestant)
                if not self.rounds.fits(self._budget):
                    return

    def _turn(self, contestant: Contestant) -> None:
        number, began, runner = self.rounds.count, self.rounds.seconds(), contestant.runner
        assert runner is not None
        try:
            contestant.times[number] = runner.turn(number)
            contestant.seconds = min(contestant.seconds, self.rounds.seconds() - began)
        except CandidateError as error:
            if contestant.candidate is self.standings.base.candidate:
                raise
            self._disqualify(contestant, "failed", str(error))

    def _eliminate_slower(self) -> None:
        """Eliminate the contestants that are slower than the best.

        A recipe is verified before it eliminates the unprepared model or a verified recipe. It may
        eliminate an unverified recipe at once; that comes back if the winner later fails its verification.
        """
        standings, base = self.standings, self.standings.base
        self._restore_unprepared()
        while True:
            live = standings.live()
            best = min(live, key=standings.speed)
            losers = {each: best for each in live if standings.is_slower(each, best)}
            better = [each for each in live if standings.is_better(each)]
            if base in live and better:
                losers[base] = min(better, key=standings.speed)
            need_proof = [by for each, by in losers.items() if each is base or each.checked]
            unverified = [by for by in need_proof if by is not base and by.checked is None]
            if not unverified:
                break
            self._passes(min(unverified, key=standings.speed))
        for each, faster in losers.items():
            ratio = standings.compared(each, faster)
            self._eliminate(each, "slower", f"{pace_text(*ratio)} than {faster.name}", faster)

    def _eliminate(
        self, contestant: Contestant, status: str, reason: str, by: Contestant | None = None
    ) -> None:
        contestant.status, contestant.reason, contestant.eliminated_by = status, reason, by
        if contestant is not self.standings.base:
            contestant.runner = None  # releases its copy of the model

    def _restore(self, contestant: Contestant) -> None:
        contestant.status, contestant.reason, contestant.eliminated_by = "", "", None

    def _restore_unprepared(self) -> None:
        """Restore the unprepared model, which runs in every round, unless a live recipe is faster."""
        standings = self.standings
        if standings.base.status and not any(map(standings.is_better, standings.live())):
            self._restore(standings.base)

    def _bring_back(self, rounds: int = _WORTHWHILE_ROUNDS) -> bool:
        """Start recipes again whose elimination may be noise, if there is time; return whether one runs."""
        order, came_back = self._start_order, False
        returned = sum(each.since > 0 for each in self.standings.live())
        for each in self.standings.doubtful()[: max(_FINALISTS - returned, 0)]:
            left = self._left() - (order.longest_compilation if each.candidate.compiles else 0.0)
            full = len(self.standings.running()) - 1 >= self._capacity
            if full or not order.has_time(left, rounds):
                break
            self._restore(each)
            each.since = self.rounds.count  # its early rounds are what is in doubt
            self._enter(each)
            came_back = came_back or not each.status
        return came_back

    def _disqualify(self, contestant: Contestant, status: str, reason: str) -> None:
        """Drop a contestant that cannot win, and restore those that it had eliminated."""
        self._eliminate(contestant, status, reason)
        for each in self.contestants:
            if each.eliminated_by is contestant:
                self._restore(each)
        self._restore_unprepared()

    def _passes(self, contestant: Contestant) -> bool:
        """Return whether it passes its verification, which runs once; disqualify it if not."""
        if contestant is self.standings.base:
            return True
        if contestant.checked is None:
            assert contestant.runner is not None
            began = self.rounds.seconds()
            with self._progress(f"verifying {contestant.name}; {self._state()}"):
                contestant.checked = self._check(contestant.candidate, contestant.runner)
            if contestant.candidate.compiles:
                self._extend_budget_for(contestant)
            if contestant.checked.status != "pass":
                self._refund(self.rounds.seconds() - began)
        checked = contestant.checked
        if checked.status == "fail":
            self._disqualify(contestant, "wrong", f"its verification failed: {checked.reason}")
        elif checked.status != "pass":
            reason = f"it could not be verified: {checked.reason}"
            self._disqualify(contestant, "cannot tell", reason)
        return checked.status == "pass"

    def _refund(self, seconds: float) -> None:
        """Give the time of a failed verification to the recipes that come back because of it."""
        refund = min(seconds, self._refundable)
        self._budget, self._refundable = self._budget + refund, self._refundable - refund

    def _settle(self) -> Contestant:
        """Keep the simplest of the contestants that are about as fast as the fastest."""
        self._eliminate_slower()
        while True:
            winner = self.standings.simplest()
            if self._passes(winner):
                break
        for each in self.standings.live():
            if each is not winner:
                ratio = self.standings.compared(each, winner)
                why = "simpler" if each.candidate.cost > winner.candidate.cost else "faster so far"
                reason = f"{pace_text(*ratio)} than {winner.name}, which is {why}"
                self._eliminate(each, "not faster", reason)
        return winner

    def _conclude(self) -> Contestant:
        for each in self.standings.live():
            if not each.counted():
                each.since = 0  # it came back, and there was no time for it
            if each is not self.standings.base and not each.times:
                self._eliminate(each, "not measured", "no time was left to time it")
        winner = self._settle()
        for each in self.standings.waiting():
            # A contestant that has times was eliminated once, and then restored.
            again = " again, after the recipe that had eliminated it was dropped"
            reason = f"no time was left to try it{again if each.times else ''}"
            self._eliminate(each, "not measured", reason)
        if winner is not (base := self.standings.base):  # with all rounds, not the first ones alone
            ratio = self.standings.compared(base, winner)
            self._eliminate(base, "slower", f"{pace_text(*ratio)} than {winner.name}", winner)
        winner.status, winner.reason = "winner", self._win_reason(winner)
        return winner

    def _win_reason(self, winner: Contestant) -> str:
        if winner is self.standings.base:
            return "no recipe was shown to be correct and faster"
        return f"{pace_text(*self.standings.ratio(winner))} than the unprepared model"

    def _state(self) -> str:
        """Say which contestant is ahead and how much time is left."""
        return f"{self.standings.summary()}{max(self._left(), 0):.0f} s left"


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
        if eager and (nothing_runs or self.has_time(left - reserved)):
            return first or eager[0]
        if first and self.has_time(left):
            return first
        if compiled and (self.standings.is_clear() or left <= reserved):
            fits = self.has_time(left - self.longest_compilation)
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

    def has_time(self, left: float, rounds: int = _WORTHWHILE_ROUNDS) -> bool:
        """Return whether so many rounds with one more contestant fit into `left` seconds."""
        return rounds * (self.round_seconds() + self.standings.base.seconds) < left

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
            and each.counted()
            and not each.candidate.compiles
        )
        return next(map(self.standings.speed, eager_twins), 1.0)
