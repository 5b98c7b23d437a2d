"""Numbers for reading: times, ratios and intervals."""

from __future__ import annotations

import math
from collections.abc import Callable

Interval = tuple[float, float] | None


def seconds(value: float) -> str:
    """Format a time with three digits: `1.23 s`, `45.6 ms`, `789 us`."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if value >= 0.9995 * scale:
            return f"{digits(value / scale)} {unit}"
    return f"{digits(value / 1e-6)} us"


def factor(value: float) -> str:
    """Format a ratio for reading: `0.82`, `12.3`, `0.0041`."""
    if value < 0.095:
        return f"{value:.2g}"
    return f"{value:.2f}" if value < 9.995 else digits(value)


def digits(value: float) -> str:
    """Format a number with three digits, or with all before the point if these are more."""
    places = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:,.{places}f}"


def span(interval: Interval, form: Callable[[float], str]) -> str:
    """Format an interval: `0.80 to 0.85`; empty for None."""
    return "" if interval is None else " to ".join(map(form, interval))


def finite(value: float | None) -> float | None:
    """Return a number as JSON can hold it; None for None, infinity and NaN."""
    return float(value) if value is not None and math.isfinite(value) else None


def small(value: float | None) -> str:
    """Format an error with two digits, `1.7e-06`; empty for None."""
    return "" if value is None else f"{value:.2g}"
