"""The figures of a run: one flat mapping in its result, which tables and comparisons of runs read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prepare.core.utils import json_records

# The statuses of convolutions that tables count.
CONVOLUTIONS = ("converted", "already", "skipped", "ineffective")
_TEXTS = "flow verified verified_what verified_reason timed timed_where timed_reason verdict busy"
_NUMBERS = (
    "layout_breaks copied_bytes verified_wrong bytes_before bytes_after verified_error "
    "verified_allowed time_ratio time_ratio_low time_ratio_high prepared_seconds"
)


def check_figures(figures: Mapping[str, Any] | None) -> None:
    """Raise TypeError or ValueError for a figure that is not plain, or not of the kind in tables."""
    for key, value in (figures or {}).items():
        number = key in _NUMBERS.split() or key.startswith("convolutions_")
        hint = (
            str
            if key in _TEXTS.split()
            else float | None
            if number or isinstance(value, float)
            else Any
        )
        json_records.check_values({key: value}, {key: hint})
        if isinstance(value, (list, dict)):
            raise TypeError(f"{key}: one value was expected")


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
