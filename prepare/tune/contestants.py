"""Who takes part in a race, and what their times in the same rounds say of two of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from prepare.bench import statistics
from prepare.bench.statistics import Estimate, Scatter

if TYPE_CHECKING:
    from prepare.tune.candidates import Candidate

CONFIDENCE = 0.95
# The race is looked at more often than once: the intervals of so many looks are to hold together.
LOOKS = 6
# An interval may rest on what all ratios scatter from so many rounds on; an exact one takes so many.
FEW, ENOUGH = 3, 20
# A clock that stands still must not divide by zero.
_SHORTEST = 1e-9


class OutError(Exception):
    """A candidate cannot be prepared or run; says why in a sentence."""


class Runner(Protocol):
    """A candidate that can be timed; `seconds` is what a turn takes, about."""

    seconds: float
    peak: int | None

    def turn(self, number: int) -> float:
        """Seconds of one call, in the round of that number. Raises OutError."""
        ...


@dataclass(frozen=True, slots=True)
class Checked:
    """What the verification of a candidate came to: pass, fail or cannot tell, and the outputs' error."""

    status: str
    reason: str = ""
    error: float | None = None
    allowed: float | None = None


@dataclass(slots=True, eq=False)
class Entrant:
    """A candidate in the race: its time in each round, and why it is out; by whom, where one is `faster`.

    `seconds` is what a turn takes at best, as far as is known.
    """

    candidate: Candidate
    runner: Runner | None = None
    seconds: float = 0.0
    times: dict[int, float] = field(default_factory=dict)
    checked: Checked | None = None
    status: str = ""
    reason: str = ""
    faster: Entrant | None = None
    peak: int | None = None

    @property
    def name(self) -> str:
        """The candidate's."""
        return self.candidate.name


def ratios(one: Entrant, other: Entrant) -> list[float]:
    """In each round that both took part in: so what slows a round down cancels out."""
    both = [number for number in one.times if number in other.times]
    return [max(one.times[n], _SHORTEST) / max(other.times[n], _SHORTEST) for n in both]


def ratio(
    one: Entrant, other: Entrant, confidence: float, known: Scatter | None
) -> Estimate | None:
    """The median of these ratios; None where there are none.

    Of fewer rounds than an exact interval takes, with what is `known` of how ratios scatter in this race.
    """
    if one is other and one.times:
        return Estimate(1.0, None)
    found = ratios(one, other)
    if known and FEW <= len(found) < ENOUGH:
        return statistics.estimate_of_few(found, confidence, known)
    return statistics.estimate(found, confidence) if found else None


def between(found: Estimate) -> str:
    """Its interval, in words."""
    return f"({found.interval[0]:.2f} to {found.interval[1]:.2f})" if found.interval else ""
