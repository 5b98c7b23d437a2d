"""The key figures of a run, from those in its result: what tables and comparisons of runs show."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from prepare.core.utils import json_records
from prepare.core.utils.numbers import part_of_tolerance

# The statuses of convolutions that tables count.
CONVOLUTIONS = ("converted", "already", "skipped", "ineffective")
_TEXTS = "flow verified verified_what verified_reason timed timed_where timed_reason verdict busy"
_COUNTS = (
    "layout_breaks copied_bytes convolutions_called convolutions_kept convolutions_rewritten "
    "verified_wrong bytes_before bytes_after"
)
_NUMBERS = (
    "verified_error verified_allowed outputs_error outputs_allowed "
    "time_ratio time_ratio_low time_ratio_high prepared_seconds"
)
_TYPES: dict[str, Any] = {
    **dict.fromkeys(_TEXTS.split(), str),
    **dict.fromkeys((*_COUNTS.split(), *(f"convolutions_{word}" for word in CONVOLUTIONS)), int),
    **dict.fromkeys(_NUMBERS.split(), float | None),
    "layout_asked": bool,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyFigures:
    """The figures of a verification.

    `error` and its tolerance `allowed` belong to the outputs, or, if these were not measured, to the check
    closest to its tolerance; `what` is its name. They are None if nothing was measured. `wrong` counts the
    checks that are wrong in the mode that does not decide.
    """

    status: str
    error: float | None = None
    allowed: float | None = None
    what: str = ""
    wrong: int = 0
    reason: str = ""

    @property
    def share(self) -> float | None:
        """Return the error as a part of its tolerance; None if there is no such number."""
        return part_of_tolerance(self.error, self.allowed)


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowFigures:
    """The figures of a layout flow: breaks in one forward, and the bytes copied at them.

    `asked`: a layout other than contiguous was asked for.
    """

    status: str
    breaks: int
    copied_bytes: int
    convolutions: int
    in_layout: int
    asked: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchFigures:
    """The figures of one comparison with the unprepared model; `ratio` below 1 is faster.

    `what` is the case: inference, training step. Ratios are comparable if `where` is the same: the
    machine, its threads, and the device of the baseline. `reason` says why a verdict is `unclear` or
    nothing was compared, `busy` what disturbed the timing.
    """

    what: str
    verdict: str
    ratio: float | None
    interval: tuple[float, float] | None
    seconds: float | None
    where: str
    reason: str = ""
    busy: str = ""

    def overlaps(self, other: BenchFigures) -> bool:
        """Return whether the two intervals overlap; false if one is missing."""
        if self.interval is None or other.interval is None:
            return False
        (low, high), (other_low, other_high) = self.interval, other.interval
        return low <= other_high and other_low <= high


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """The key figures of a job; None, or an empty `timed`, for each file that is missing."""

    convolutions: dict[str, int] | None = None
    bytes_before: int | None = None
    bytes_after: int | None = None
    lost: FlowFigures | None = None
    verified: VerifyFigures | None = None
    timed: tuple[BenchFigures, ...] = ()


def check_figures(figures: Mapping[str, Any] | None) -> None:
    """Raise TypeError or ValueError if a key figure is not finite, or not of the type in tables."""
    for key, value in (figures or {}).items():
        if isinstance(value, float):
            json_records.check_values({key: value}, {key: float})
        for end, hint in _TYPES.items():
            if key == end or key.endswith(f"_{end}"):
                json_records.check_values({end: value}, {end: hint})


def headline(figures: Mapping[str, Any] | None) -> Headline:
    """Return the key figures among those of a result; None for a run that did not come to its end."""
    found = figures or {}
    counts = {word: found.get(f"convolutions_{word}", 0) for word in CONVOLUTIONS}
    return Headline(
        convolutions=counts if "convolutions_converted" in found else None,
        bytes_before=found.get("bytes_before"),
        bytes_after=found.get("bytes_after"),
        lost=_lost(found),
        verified=_verified(found),
        timed=tuple(_timed(found)),
    )


def _lost(found: Mapping[str, Any]) -> FlowFigures | None:
    if "flow" not in found:
        return None
    return FlowFigures(
        status=found["flow"],
        breaks=found.get("layout_breaks", 0),
        copied_bytes=found.get("copied_bytes", 0),
        convolutions=found.get("convolutions_called", 0),
        in_layout=found.get("convolutions_kept", 0),
        asked=found.get("layout_asked", True),
    )


def _verified(found: Mapping[str, Any]) -> VerifyFigures | None:
    if "verified" not in found:
        return None
    # Records of older versions have the errors of outputs only.
    return VerifyFigures(
        status=found["verified"],
        error=found.get("verified_error", found.get("outputs_error")),
        allowed=found.get("verified_allowed", found.get("outputs_allowed")),
        what=found.get("verified_what", ""),
        wrong=found.get("verified_wrong", 0),
        reason=found.get("verified_reason", ""),
    )


def _timed(found: Mapping[str, Any]) -> Iterator[BenchFigures]:
    """Yield the timings; the keys of all but the first begin with what was timed."""
    if "timed" not in found:
        return
    others = [key.removesuffix("_verdict") for key in found if key.endswith("_verdict")]
    for what in ("", *others):
        start = f"{what}_" if what else ""
        own = {key.removeprefix(start): found[key] for key in found if key.startswith(start)}
        low, high = own.get("time_ratio_low"), own.get("time_ratio_high")
        yield BenchFigures(
            what=what.replace("_", " ") or found["timed"],
            verdict=own.get("verdict", ""),
            ratio=own.get("time_ratio"),
            interval=None if low is None or high is None else (low, high),
            seconds=own.get("prepared_seconds"),
            where=own.get("timed_where", ""),
            reason=own.get("timed_reason", ""),
            busy=own.get("busy", ""),
        )
