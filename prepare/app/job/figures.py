"""The figures of a run: one flat mapping in its result, which tables and comparisons of runs read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prepare.core.utils import json_records

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


def check_figures(figures: Mapping[str, Any] | None) -> None:
    """Raise TypeError or ValueError if a key figure is not finite, or not of the type in tables."""
    for key, value in (figures or {}).items():
        if isinstance(value, float):
            json_records.check_values({key: value}, {key: float})
        for end, hint in _TYPES.items():
            if key == end or key.endswith(f"_{end}"):
                json_records.check_values({end: value}, {end: hint})


def interval_of(figures: Mapping[str, Any]) -> tuple[float, float] | None:
    """Return the 95 % interval of the time ratio, if there is one."""
    low, high = figures.get("time_ratio_low"), figures.get("time_ratio_high")
    return None if low is None or high is None else (low, high)


def overlap(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    """Return whether the intervals of two time ratios overlap; false if one is missing."""
    ours, theirs = interval_of(first), interval_of(second)
    if ours is None or theirs is None:
        return False
    return ours[0] <= theirs[1] and theirs[0] <= ours[1]
