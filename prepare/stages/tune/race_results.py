"""Records of what a race found: the row of each recipe, and notes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from prepare.core.utils.machine import busy_sentence
from prepare.core.utils.numbers import finite
from prepare.core.utils.text import plural
from prepare.stages.bench import statistics
from prepare.stages.tune.records import CandidateResult

if TYPE_CHECKING:
    from prepare.stages.tune.compare_candidates import Contestant
    from prepare.stages.tune.race import Race


_MORE = "give it more time (tune.budget)"


def row_of(race: Race, winner: Contestant, contestant: Contestant) -> CandidateResult:
    """Return what a race found of one of its contestants."""
    ratio = race.standings.final_ratio(contestant, winner)
    times, checked = list(contestant.counted().values()), contestant.checked
    error, allowed = (checked.error, checked.allowed) if checked else (None, None)
    return CandidateResult(
        name=contestant.name,
        steps=contestant.candidate.steps,
        status=contestant.status,
        reason=contestant.reason,
        cost=contestant.candidate.cost,
        seconds=statistics.estimate(times, 0.95).value if times else None,
        ratio=finite(ratio.value),
        ratio_interval=ratio.interval,
        rounds=len(times),
        first_seconds=contestant.first_seconds,
        verified=checked.status if checked else "",
        error=0.0 if contestant is race.standings.base else error,
        allowed=allowed,
    )


def notes_on(race: Race, machine: Mapping[str, Any]) -> Iterator[str]:
    """Yield what limits the result."""
    measured = race.standings.control_ratio()
    if busy := busy_sentence(machine, statistics.noise(measured)):
        yield busy
    control = measured.interval
    needed = statistics.min_values(race.standings.confidence)
    unmeasured = sum(each.status == "not measured" for each in race.contestants)
    if unmeasured:
        yield f"not measured: {plural(unmeasured, 'candidate')}; {_MORE}"
    if 0 < race.rounds.count < needed:
        yield (
            f"too few rounds for small differences: {plural(race.rounds.count, 'round')} of {needed}; "
            f"{_MORE}"
        )
    if control and not control[0] <= 1 <= control[1]:
        yield (
            "the unprepared model differs significantly from itself (A/A): the machine was not steady"
        )
