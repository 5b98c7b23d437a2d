"""Lets candidates run against each other, and takes out those that are slower, until it is clear who won."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

from prepare.bench import statistics
from prepare.tune.contestants import (
    CONFIDENCE,
    ENOUGH,
    LOOKS,
    Checked,
    Entrant,
    OutError,
    Runner,
    between,
    ratio,
    ratios,
)

if TYPE_CHECKING:
    from prepare.bench.statistics import Estimate, Scatter
    from prepare.bench.variant import Clock
    from prepare.core.utils.progress import Stage
    from prepare.tune.candidates import Candidate

PRECISION = 0.02
# The confidence with which one recipe is slower than another. To take the wrong one of two that are
# faster than the unprepared model costs little, and who is out leaves time for the others.
RIVALS = 0.8
# Rounds between two looks: to look after each one would favour those that are quick by chance.
BLOCK = 3
# Rounds that there has to be time for before another one is let in.
WORTH = 3
# Of the budget; what needs no compiler has to make do with the rest, while something waits for it:
# all but the first in each precision.
TO_COMPILE = 0.6
# Of the budget: as long may verifications take that are not counted, of those that do not pass.
UNCOUNTED = 0.5


class Race:
    """One race. `run` gives the winner, and is called once; then all is in `entrants`.

    The first candidate is the unprepared model: it runs to the end, twice, for the others to be
    compared with, and is right by definition. `start` prepares a candidate and makes its first
    calls. `check` verifies one that runs. At most `capacity` run at a time, and no fewer than three.
    """

    def __init__(
        self,
        candidates: Sequence[Candidate],
        *,
        start: Callable[[Candidate], Runner],
        check: Callable[[Candidate, Runner], Checked],
        budget: float,
        clock: Clock,
        capacity: int = 1000,
        seed: int = 0,
        progress: Stage = lambda _: nullcontext(),
    ) -> None:
        self.entrants = [Entrant(candidate) for candidate in candidates]
        self.rounds = 0
        self._start, self._check, self._capacity = start, check, max(capacity, 3)
        self._budget, self._clock, self._began = budget, clock, clock()
        self._order, self._progress = random.Random(seed), progress  # noqa: S311
        self.confidence = statistics.bonferroni(CONFIDENCE, LOOKS * (len(candidates) - 1))
        self._base, self._again = self.entrants[0], Entrant(candidates[0])
        self._to_compile, self._uncounted = budget * TO_COMPILE, budget * UNCOUNTED
        self._longest = 0.0  # of those that compile, until they ran

    def run(self) -> Entrant:
        """Lets them run. The winner passed its verification, or is the unprepared model.

        Raises:
            OutError: the unprepared model itself does not run.
        """
        self._enter(self._base)
        if self._base.status:
            raise OutError(self._base.reason)
        self._again.runner, self._again.seconds = self._base.runner, self._base.seconds
        while self._left() > 0:
            self._admit()
            if not self._is_clear():
                self._go()
                self._take_slower_out()
            elif self._next():
                self._settle()  # makes room
            elif self._passes(self._simplest()):
                break
        return self._conclude()

    def control(self) -> Estimate | None:
        """The unprepared model against itself; None without a round."""
        return ratio(self._again, self._base, CONFIDENCE, self._scatter())

    def ratio(self, entrant: Entrant) -> Estimate | None:
        """An entrant's time to that of the unprepared model; None where it was not timed."""
        return ratio(entrant, self._base, self.confidence, self._scatter())

    def ratio_by(self, winner: Entrant, entrant: Entrant) -> Estimate | None:
        """The same, of one that was out before the winner was done, by way of the winner's.

        The few rounds of a start may be unlike all others: what was out after them had its time
        compared with that of the others in the same ones.
        """
        to_winner = ratio(entrant, winner, self.confidence, self._scatter())
        early = entrant.times and len(entrant.times) < len(winner.times)
        if winner is self._base or entrant is self._base or not early or to_winner is None:
            return self.ratio(entrant)
        value, interval = self.ratio(winner).value, to_winner.interval
        scaled = interval and (interval[0] * value, interval[1] * value)
        return statistics.Estimate(to_winner.value * value, scaled)

    # Who takes part.

    def _admit(self) -> None:
        """Lets in whom there is room and time for; of those that compile one at a time."""
        while len(self._running()) - 1 < self._capacity and (entrant := self._next()):
            self._enter(entrant)
            if entrant.candidate.compiles and not entrant.status:
                return

    def _next(self) -> Entrant | None:
        """Who is to be let in, if there is room."""
        light = [each for each in self._waiting() if not each.candidate.compiles]
        heavy = [each for each in self._waiting() if each.candidate.compiles]
        kept = self._to_compile if heavy else 0.0
        new = self._new_in_precision(light)
        if light and (len(self._running()) == 2 or self._has_time(self._left() - kept)):
            return new or light[0]
        if new and self._has_time(self._left()):
            return new
        if heavy and (self._is_clear() or self._left() <= kept):
            return (
                min(heavy, key=self._promise) if self._has_time(self._left(), heavy=True) else None
            )
        return None

    def _new_in_precision(self, light: list[Entrant]) -> Entrant | None:
        """One in a precision that none was tried in without a compiler."""
        tried = [
            e for e in self.entrants[1:] if not e.candidate.compiles and (e.runner or e.status)
        ]
        known = {each.candidate.precision for each in tried}
        return next((each for each in light if each.candidate.precision not in known), None)

    def _has_time(self, left: float, *, heavy: bool = False) -> bool:
        """Whether enough rounds with one more would end in time, and before them a compilation."""
        turns = self._a_round() + self._base.seconds
        return WORTH * turns + heavy * self._longest < left

    def _a_round(self) -> float:
        """Seconds that a round takes, about."""
        return sum(each.seconds for each in self._running())

    def _enter(self, entrant: Entrant) -> None:
        began = self._clock()
        with self._progress(f"trying {entrant.name}; {self._standing()}"):
            try:
                entrant.runner = self._start(entrant.candidate)
                entrant.seconds, entrant.peak = entrant.runner.seconds, entrant.runner.peak
            except OutError as error:
                self._out(entrant, "failed", str(error))
        if entrant.candidate.compiles:
            self._longest = max(self._longest, self._clock() - began)
            self._keep_time_for(entrant)

    def _keep_time_for(self, entrant: Entrant) -> None:
        """What has been waited for, compiled or verified, is not to be lost for the want of a few rounds."""
        rounds = statistics.min_values(self.confidence) + 1 - len(entrant.times)
        self._budget = max(self._budget, self._budget - self._left() + rounds * self._a_round())

    def _out(
        self, entrant: Entrant, status: str, reason: str, faster: Entrant | None = None
    ) -> None:
        entrant.status, entrant.reason, entrant.faster = status, reason, faster
        if entrant is not self._base:
            entrant.runner = None  # and with it goes its copy of the model

    def _disqualify(self, entrant: Entrant, status: str, reason: str) -> None:
        """Takes one out that does not count; those that were out because of it try again.

        So does the unprepared model, unless who took it out still runs, or whoever took that one out.
        """
        self._out(entrant, status, reason)
        for each in self.entrants:
            if each.faster is entrant:
                self._out(each, "", "")
        proof = self._base
        while proof.faster:
            proof = proof.faster
        if proof not in self._live():
            self._out(self._base, "", "")

    def _waiting(self) -> list[Entrant]:
        return [each for each in self.entrants if not each.runner and not each.status]

    def _live(self) -> list[Entrant]:
        """Those that may still win."""
        return [each for each in self.entrants if each.runner and not each.status]

    def _running(self) -> list[Entrant]:
        rest = [each for each in self._live() if each is not self._base]
        return [self._base, self._again, *rest]

    # Rounds.

    def _go(self) -> None:
        with self._progress(f"timing {len(self._live())} recipes; {self._standing()}"):
            for _ in range(BLOCK):
                began, running = self._clock(), self._running()
                for entrant in self._order.sample(running, len(running)):
                    self._turn(entrant)
                self.rounds += 1
                if self._left() < self._clock() - began:
                    return

    def _turn(self, entrant: Entrant) -> None:
        began = self._clock()
        try:
            entrant.times[self.rounds] = entrant.runner.turn(self.rounds)
            entrant.seconds = min(entrant.seconds, self._clock() - began)
        except OutError as error:
            if entrant.candidate is self._base.candidate:
                raise
            self._disqualify(entrant, "failed", str(error))

    def _left(self) -> float:
        return self._budget - (self._clock() - self._began)

    # Who is out.

    def _take_slower_out(self) -> None:
        """Who takes out the unprepared model, or one that is verified, is verified before.

        Whom one takes out that is not, comes back if that turns out to be wrong.
        """
        while True:
            live = self._live()
            best = min(live, key=self._speed)
            losers = {each: best for each in live if self._is_slower(each, best)}
            better = [each for each in live if self._is_better(each)]
            if self._base in live and better:
                losers[self._base] = min(better, key=self._speed)
            asked = (
                faster for each, faster in losers.items() if each is self._base or each.checked
            )
            fresh = [each for each in asked if each is not self._base and each.checked is None]
            if not fresh:
                break
            self._passes(min(fresh, key=self._speed))
        for each, faster in losers.items():
            found = self._compared(each, faster)
            times = f"takes {found.value:.2f} times as long as {faster.name}"
            self._out(each, "slower", f"{times} {between(found)}".rstrip(), faster)

    def _is_better(self, entrant: Entrant) -> bool:
        """Than the unprepared model, beyond doubt and beyond the noise: only then is that one out."""
        found, control = self.ratio(entrant), self.control()
        return bool(found and control and statistics.verdict(found, control) == "faster")

    def _is_slower(self, one: Entrant, best: Entrant) -> bool:
        """Probably; and by more than a little, where it is the simpler of two recipes."""
        found = self._compared(one, best)
        if one in (best, self._base) or found is None or found.interval is None:
            return False
        simpler = best is not self._base and one.candidate.cost < best.candidate.cost
        return found.interval[0] > 1 and (found.value > 1 + PRECISION or not simpler)

    def _passes(self, entrant: Entrant) -> bool:
        """Verifies it, if nobody has yet; one that does not pass is out."""
        if entrant is self._base:
            return True
        if entrant.checked is None:
            began = self._clock()
            with self._progress(f"verifying {entrant.name}; {self._standing()}"):
                entrant.checked = self._check(entrant.candidate, entrant.runner)
            if entrant.candidate.compiles:
                self._keep_time_for(entrant)
            if entrant.checked.status != "pass":
                self._give_back(self._clock() - began)
        found = entrant.checked
        if found.status == "fail":
            self._disqualify(entrant, "wrong", f"its verification failed: {found.reason}")
        elif found.status != "pass":
            self._disqualify(entrant, "cannot tell", f"it could not be verified: {found.reason}")
        return found.status == "pass"

    def _give_back(self, seconds: float) -> None:
        """Time that one took who is wrong, to those who come back since it had taken them out."""
        given = min(seconds, self._uncounted)
        self._budget, self._uncounted = self._budget + given, self._uncounted - given

    def _settle(self) -> Entrant:
        """The simplest of those that are about as fast as the fastest; the others are out."""
        self._take_slower_out()
        while not self._passes(winner := self._simplest()):
            pass
        for each in self._live():
            if each is not winner:
                value = self._compared(each, winner).value
                why = "simpler" if each.candidate.cost > winner.candidate.cost else "faster so far"
                times = f"takes {value:.2f} times as long as {winner.name}"
                self._out(each, "not faster", f"{times}, which is {why}: no significant difference")
        return winner

    def _simplest(self) -> Entrant:
        """The unprepared model, while it is not out; then of those within 2 % of the fastest."""
        live = self._live()
        if self._base in live or not live:
            return self._base
        fastest = min(map(self._speed, live))
        near = [each for each in live if self._speed(each) <= fastest * (1 + PRECISION)]
        return min(near, key=lambda each: (each.candidate.cost, self._speed(each)))

    def _is_clear(self) -> bool:
        """Whether it is known how those that are left compare, so that more rounds would tell no more."""
        live = self._live()
        best = min(live, key=self._speed)
        others = [each for each in {*live, self._base} if each is not best]
        if any(len(ratios(each, best)) < ENOUGH for each in others):
            return False
        return all(self._compared(each, best).precision <= PRECISION for each in others)

    # What is known of them.

    def _compared(self, one: Entrant, other: Entrant) -> Estimate | None:
        """How long one takes to the other's time: surer where that is to take the unprepared model out."""
        sure = self.confidence if one is self._base else RIVALS
        return ratio(one, other, sure, self._scatter())

    def _scatter(self) -> Scatter | None:
        """How ratios to the unprepared model scatter from round to round, over all that were timed."""
        timed = [ratios(each, self._base) for each in (self._again, *self.entrants[1:])]
        return statistics.scatter(timed)

    def _speed(self, entrant: Entrant) -> float:
        found = self.ratio(entrant)
        return found.value if found else math.inf

    def _promise(self, entrant: Entrant) -> tuple[float, int, float]:
        """How soon it is tried, of those that compile: the lowest first.

        Each compiler once, on what is fastest without it, in the order of these candidates; then the
        fastest compiler on the rest.
        """
        same = [e for e in self.entrants if e.candidate.compiler == entrant.candidate.compiler]
        tried = [self._speed(each) for each in same if each.runner or each.status]
        place = self.entrants.index(min(same, key=self._eager_speed))
        return min(tried, default=0.0), place, self._eager_speed(entrant)

    def _eager_speed(self, entrant: Entrant) -> float:
        """Of the same without a compiler."""
        eager = [e for e in self.entrants if e.candidate.eager == entrant.candidate.eager]
        plain = (e for e in eager if e.times and not e.candidate.compiles)
        return next(map(self._speed, plain), 1.0)

    def _standing(self) -> str:
        """Who is ahead, and how much time is left, in words."""
        left = f"{max(self._left(), 0):.0f} s left"
        timed = [each for each in self._live() if each.times]
        if not timed:
            return left
        best = min(timed, key=self._speed)
        return f"best so far {best.name} ({self._speed(best):.2f} of the unprepared time), {left}"

    # The end.

    def _conclude(self) -> Entrant:
        for each in self._live():
            if each is not self._base and not each.times:
                self._out(each, "not measured", "there was no time left to time it")
        winner = self._settle()
        for each in self._waiting():
            again = " again, after who took it out did not count" if each.times else ""
            self._out(each, "not measured", f"there was no time left to try it{again}")
        winner.status, winner.reason = "winner", self._praise(winner)
        return winner

    def _praise(self, winner: Entrant) -> str:
        if winner is self._base:
            return "no recipe that was verified is faster beyond doubt"
        found = self.ratio(winner)
        return (
            f"takes {found.value:.2f} of the time of the unprepared model {between(found)}".rstrip()
        )
