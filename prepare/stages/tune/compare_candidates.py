"""The candidates of a race, and how they compare by their times in the same rounds."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from prepare.core.utils.numbers import verdict_text
from prepare.stages.bench import statistics
from prepare.stages.bench.statistics import Estimate, Scatter

if TYPE_CHECKING:
    from prepare.stages.tune.candidates import Candidate

CONFIDENCE = 0.95
# Ratios that are closer than this count as equal, and the simpler recipe wins.
PRECISION = 0.02
# The confidence with which one recipe is slower than another. To keep the wrong one of two recipes that
# are both faster than the unprepared model costs little, and an elimination leaves time for the others.
_RIVAL_CONFIDENCE = 0.8
# The standings are evaluated repeatedly: so many evaluations hold together with CONFIDENCE.
_LOOKS = 6
# From so many rounds on, an interval may rest on the scatter of all ratios; an exact one needs more.
_FEW_ROUNDS, _EXACT_ROUNDS = 3, 20
# A recipe that is slower by this factor in few rounds counts as slower: other programs rarely cause that.
_DISTURBED = 2.0
_UNKNOWN = Estimate(math.inf, None)


class CandidateError(Exception):
    """A candidate cannot be prepared or run; the message says why."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The verification of a candidate: its status (pass, fail, cannot tell) and the error of the outputs."""

    status: str
    reason: str = ""
    error: float | None = None
    allowed: float | None = None


@dataclass(slots=True, eq=False)
class Contestant:
    """A candidate in the race, with its time in each round.

    `runner` is its `PreparedCandidate` while it is in the race. `seconds` is the shortest time of a turn so
    far. `status` is empty while it can still win; then `reason` says why it lost, and `eliminated_by` is the
    faster contestant, if it lost to one. Its times count from the round `since` on, the one in which it came
    back because its elimination may have been noise.
    """

    candidate: Candidate
    runner: Any = None
    seconds: float = 0.0
    times: dict[int, float] = field(default_factory=dict)
    checked: CheckResult | None = None
    status: str = ""
    reason: str = ""
    eliminated_by: Contestant | None = None
    since: int = 0
    first_seconds: float | None = None

    @property
    def name(self) -> str:
        """The name of the candidate."""
        return self.candidate.name

    def counted(self) -> dict[int, float]:
        """Return its time in each round that counts."""
        return {n: time for n, time in self.times.items() if n >= self.since}


@dataclass(frozen=True, slots=True)
class Standings:
    """All contestants, the unprepared model first; `control` is its second run in each round (A/A)."""

    contestants: list[Contestant]
    control: Contestant

    @property
    def base(self) -> Contestant:
        """The unprepared model."""
        return self.contestants[0]

    @property
    def confidence(self) -> float:
        """The confidence of each interval against the unprepared model, so that all hold together."""
        return statistics.bonferroni(CONFIDENCE, _LOOKS * (len(self.contestants) - 1))

    def live(self) -> list[Contestant]:
        """Return the contestants that run and can still win."""
        return [each for each in self.contestants if each.runner and not each.status]

    def waiting(self) -> list[Contestant]:
        """Return the contestants that have not been started, or were brought back."""
        return [each for each in self.contestants if not each.runner and not each.status]

    def running(self) -> list[Contestant]:
        """Return all that take a turn in a round: the unprepared model twice, and the live recipes."""
        return [self.base, self.control, *(each for each in self.live() if each is not self.base)]

    def control_ratio(self) -> Estimate:
        """Estimate the ratio of the unprepared model to itself."""
        return self._ratio(self.control, self.base, CONFIDENCE)

    def ratio(self, contestant: Contestant) -> Estimate:
        """Estimate the ratio of a contestant's time to the unprepared model's; inf if it was not timed."""
        return self._ratio(contestant, self.base, self.confidence)

    def final_ratio(self, contestant: Contestant, winner: Contestant) -> Estimate:
        """Estimate the ratio to the unprepared model at the end of the race.

        For a recipe that was eliminated early, this is its ratio to the winner times the winner's ratio:
        its own few early rounds may not be representative, but in these it was compared with others.
        """
        to_winner = self._ratio(contestant, winner, self.confidence)
        early = 0 < len(contestant.counted()) < len(winner.counted())
        if self.base in (winner, contestant) or not early or to_winner == _UNKNOWN:
            return self.ratio(contestant)
        value, interval = self.ratio(winner).value, to_winner.interval
        scaled = interval and (interval[0] * value, interval[1] * value)
        return Estimate(to_winner.value * value, scaled)

    def compared(self, contestant: Contestant, other: Contestant) -> Estimate:
        """Estimate the ratio of two times, with more confidence if it can eliminate the unprepared model.

        A contestant that came back is compared with that confidence too.
        """
        sure = contestant is self.base or contestant.since > 0
        return self._ratio(contestant, other, self.confidence if sure else _RIVAL_CONFIDENCE)

    def doubtful(self) -> list[Contestant]:
        """Return those whose elimination may be noise, the most promising first; each comes back once."""
        best = min(self.live(), key=self.speed, default=self.base)
        lost = [each for each in self.contestants[1:] if each.status in ("slower", "not faster")]
        ratios = {each: self._surely(each, best) for each in lost if not each.since}
        doubted = [
            each
            for each, ratio in ratios.items()
            if self._may_be_disturbed(each, ratio)
            or not ratio.interval
            or (ratio.interval[0] < 1 and ratio.precision > PRECISION)
        ]
        return sorted(doubted, key=lambda each: ratios[each].value)

    def _may_be_disturbed(self, contestant: Contestant, ratio: Estimate) -> bool:
        """Return whether an interval of few rounds is not trusted: a disturbance may last longer."""
        return ratio.value < _DISTURBED and len(contestant.counted()) < _EXACT_ROUNDS

    def _surely(self, contestant: Contestant, best: Contestant) -> Estimate:
        """Compare with high confidence, through the unprepared model if both ran in too few rounds."""
        ratio = self._ratio(contestant, best, self.confidence)
        own, other = self.ratio(contestant), self.ratio(best)
        if ratio.interval or not own.interval or not other.interval:
            return ratio
        ends = own.interval[0] / other.interval[1], own.interval[1] / other.interval[0]
        return Estimate(own.value / other.value, ends)

    def speed(self, contestant: Contestant) -> float:
        """Return the median ratio to the unprepared model's time: the lower, the faster."""
        return self.ratio(contestant).value

    def is_better(self, contestant: Contestant) -> bool:
        """Return whether it is significantly faster than the unprepared model."""
        noise = statistics.noise(self.control_ratio())
        return statistics.verdict(self.ratio(contestant), noise) == "faster"

    def is_slower(self, contestant: Contestant, best: Contestant) -> bool:
        """Return whether it is probably slower; if it is the simpler recipe, by more than 2 %."""
        if contestant in (best, self.base):
            return False
        ratio = self.compared(contestant, best)
        if contestant.since and self._may_be_disturbed(contestant, ratio):
            return False
        simpler = best is not self.base and contestant.candidate.cost < best.candidate.cost
        slower = ratio.interval is not None and ratio.interval[0] > 1
        return slower and (ratio.value > 1 + PRECISION or not simpler)

    def is_clear(self) -> bool:
        """Return whether all live contestants are compared so precisely that more rounds add nothing."""
        live = self.live()
        best = min(live, key=self.speed)
        others = [each for each in {*live, self.base} if each is not best]
        if any(len(_ratios(each, best)) < _EXACT_ROUNDS for each in others):
            return False
        return all(self.compared(each, best).precision <= PRECISION for each in others)

    def simplest(self) -> Contestant:
        """Return the unprepared model while it is live, else the simplest within 2 % of the fastest.

        It is one of those that are significantly faster than the unprepared model.
        """
        live = [each for each in self.live() if self.is_better(each)]
        if not self.base.status or not live:
            return self.base
        fastest = min(map(self.speed, live))
        near = [each for each in live if self.speed(each) <= fastest * (1 + PRECISION)]
        return min(near, key=lambda each: (each.candidate.cost, self.speed(each)))

    def summary(self) -> str:
        """Say which live contestant is ahead; empty before the first round."""
        timed = [each for each in self.live() if each.counted()]
        if not timed:
            return ""
        return f"{self.best_text(min(timed, key=self.speed))}, "

    def best_text(self, best: Contestant) -> str:
        """Return `best so far channels_last (1.8x faster)`."""
        if best is self.base:
            return f"best so far {best.name}"
        ratio = self.ratio(best)
        speed = verdict_text("faster" if ratio.value < 1 else "slower", *ratio)
        return f"best so far {best.name} ({speed})"

    def _ratio(self, contestant: Contestant, other: Contestant, confidence: float) -> Estimate:
        """Estimate the median ratio of their times; from few rounds, with the scatter of all ratios."""
        if contestant is other and contestant.times:
            return Estimate(1.0, None)
        ratios = _ratios(contestant, other)
        if not ratios:
            return _UNKNOWN
        if _FEW_ROUNDS <= len(ratios) < _EXACT_ROUNDS and (scatter := self._scatter()):
            return statistics.estimate_of_few(ratios, confidence, scatter)
        return statistics.estimate(ratios, confidence)

    def _scatter(self) -> Scatter | None:
        """Return how ratios to the unprepared model scatter between rounds, over all contestants."""
        others = (self.control, *self.contestants[1:])
        return statistics.scatter([_ratios(each, self.base) for each in others])


def _ratios(contestant: Contestant, other: Contestant) -> list[float]:
    """Return the ratio in each round that both ran in: what slows a round down cancels out."""
    times = [each.counted() for each in (contestant, other)]
    both = [number for number in times[0] if number in times[1]]
    return statistics.ratios(*([each[number] for number in both] for each in times))
