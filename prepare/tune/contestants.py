"""The contestants of a race: candidates with their times, their verification and their outcome."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from prepare.tune.candidates import Candidate
    from prepare.tune.records import KeptModule


class CandidateError(Exception):
    """A candidate cannot be prepared or run; the message says why."""


class TimedCandidate(Protocol):
    """A prepared candidate that can be timed.

    `seconds` is the time of a turn, about; `first_seconds` that of the first call.
    """

    seconds: float
    peak: int | None
    first_seconds: float

    def turn(self, number: int) -> float:
        """Return the seconds of one call, in round `number`. Raise CandidateError if it fails."""
        ...


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

    `seconds` is the shortest time of a turn so far. `status` is empty while it can still win; then
    `reason` says why it lost, and `eliminated_by` is the faster contestant, if it lost to one. `kept` are the
    modules that were found to need float32.
    """

    candidate: Candidate
    runner: TimedCandidate | None = None
    seconds: float = 0.0
    times: dict[int, float] = field(default_factory=dict)
    checked: CheckResult | None = None
    status: str = ""
    reason: str = ""
    eliminated_by: Contestant | None = None
    peak: int | None = None
    first_seconds: float | None = None
    kept: tuple[KeptModule, ...] = ()

    @property
    def name(self) -> str:
        """The name of the candidate."""
        return self.candidate.name
