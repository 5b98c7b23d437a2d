"""A race of recipes on a simulated clock."""

import math
import random
from collections import Counter

from clocks import Clock, bursts, noisy
from prepare.stages.tune.candidates import Candidate
from prepare.stages.tune.compare_candidates import CandidateError, CheckResult
from prepare.stages.tune.race import Race
from prepare.stages.tune.records import UNPREPARED


class ScriptedRunner:
    """A runner whose calls take a given time on a simulated clock."""

    def __init__(self, clock, spent, *, breaks_at=math.inf):
        self._clock, self._spent, self._left = clock, spent, breaks_at
        self.seconds, self.first_seconds = spent(), 0.0

    def turn(self, number):
        self._left -= 1
        if self._left < 0:
            raise CandidateError("no more")
        taken = self._spent()
        self._clock.now += taken
        return taken


class SimulatedRace:
    """A race of candidates with given mean times; records which were started and verified."""

    def __init__(
        self, means, *, budget=100.0, spread=0.01, steps=None, checks=(), starts=(), breaks=(),
        seed=0, capacity=1000, checking=0.0, disturbed=None, slow_first=(),
    ):  # fmt: skip
        self.clock, self.checked, self.alive, self.most = Clock(), [], Counter(), 0
        self.means, self._spread, self._seed, self._checking = means, spread, seed, checking
        self._checks, self._starts, self._breaks = dict(checks), dict(starts), dict(breaks)
        self._slow_first = {name: [*each] for name, each in dict(slow_first).items()}
        self._slower = bursts(self.clock, seed, **disturbed) if disturbed else lambda: 1.0
        made = {UNPREPARED: {}} | {name: {"some_step": {}} for name in list(means)[1:]}
        made |= steps or {}
        self.race = Race(
            [Candidate(name, made[name]) for name in means],
            start=self.start, check=self.check, budget=budget, clock=self.clock,
            capacity=capacity, seed=seed,
        )  # fmt: skip

    def start(self, candidate):
        took = self._starts.get(candidate.name, 0.0)
        if isinstance(took, str):
            raise CandidateError(took)
        self.clock.now += took
        live = [each.name for each in self.race.standings.live()]
        self.most = max(self.most, len({UNPREPARED, *live, candidate.name}))
        order = random.Random(f"{self._seed} {candidate.name}")

        def spent():
            factor, calls = slow_first = self._slow_first.setdefault(candidate.name, [1.0, 0])
            slow_first[1] -= 1
            return alone() * self._slower() * (factor if calls > 0 else 1.0)

        alone = noisy(self.means[candidate.name], self._spread, order.random())
        return ScriptedRunner(
            self.clock,
            spent,
            breaks_at=self._breaks.get(candidate.name, math.inf),
        )

    def check(self, candidate, runner):
        self.checked.append(candidate.name)
        self.clock.now += self._checking
        return self._checks.get(candidate.name, CheckResult("pass", error=1e-6, allowed=1e-5))

    def run(self):
        self.winner = self.race.run()
        self.by_name = {each.name: each for each in self.race.contestants}
        return self


FAIL, UNSURE = CheckResult("fail", "outputs: off"), CheckResult("cannot tell", "there is no time")
