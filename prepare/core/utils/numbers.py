"""Numbers for reading: times, ratios and intervals, and ratios of times in words."""

from __future__ import annotations

import math
from collections.abc import Callable

Interval = tuple[float, float] | None
# A wider interval, as a factor between its ends, is not printed.
_WIDEST = 4.0
# From this ratio on, a time is given as a factor, not in percent.
_MANIFOLD = 3.0
# From this ratio on, a figure is printed only if its interval is narrower than this factor.
_BEYOND, _NARROW = 10.0, 1.5
# More noise than this, as a factor, is not printed.
_LOUDEST = 1.5


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


def verdict_text(verdict: str, ratio: float | None, interval: Interval = None) -> str:
    """Return `1.5x faster` or `1.2x slower`; the verdict itself if it is another one.

    A large ratio with a wide interval is not a figure: `over 10x slower`, or the verdict alone.
    """
    if ratio is None or verdict not in ("faster", "slower"):
        return verdict
    if verdict == "slower" and ratio >= _BEYOND and interval and not _is_shown(interval):
        return f"over {_BEYOND:g}x slower" if interval[0] >= _BEYOND else verdict
    return f"{_times(1 / ratio if verdict == 'faster' else ratio)} {verdict}"


def speed_text(
    verdict: str, ratio: float | None, interval: Interval, *, confidence: float = 0.95
) -> str:
    """Return the verdict with its figures: `1.5x faster (34 % less time, 95 % interval: 28 to 39 %)`.

    `unclear` has none but its interval, and that only if it is narrow enough to say something.
    """
    words = verdict_text(verdict, ratio, interval)
    if ratio is None or verdict not in ("faster", "slower", "no difference", "unclear"):
        return words
    parts = []
    if verdict == "faster":
        parts.append(f"{_percent(1 - ratio)} less time")
    elif verdict == "slower" and ratio < _MANIFOLD:
        parts.append(f"{_percent(ratio - 1)} more time")
    if interval is not None and (shown := _between(verdict, ratio, interval)):
        parts.append(f"{100 * confidence:g} % interval: {shown}")
    return f"{words} ({', '.join(parts)})" if parts else words


def change_text(verdict: str, ratio: float | None) -> str:
    """Return the change of the time: `-34 %`; empty if unclear, or if the ratio is shown as a factor."""
    return "" if ratio is None or verdict == "unclear" or ratio >= _MANIFOLD else _change(ratio)


def interval_text(interval: Interval) -> str:
    """Return the interval of the change of the time: `-39 to -28 %`; empty if it says nothing.

    An interval that ends beyond a manifold of the time is one of factors: `2.8x to 3.4x`.
    """
    if interval is None or not _is_shown(interval):
        return ""
    if interval[1] >= _MANIFOLD:
        return " to ".join(map(_times, interval))
    low, high = (_change(end).removesuffix(" %") for end in interval)
    return f"{low} to {high} %"


def noise_text(noise: float | None) -> str:
    """Return what the unprepared model shows against itself; empty if there is no interval."""
    if noise is None:
        return ""
    if noise > _LOUDEST:
        return "these times scatter too much to show a difference"
    return f"differences below {100 * (noise - 1):.1f} % are noise"


def _between(verdict: str, ratio: float, interval: tuple[float, float]) -> str:
    """Return the interval in the units of the verdict."""
    low, high = interval
    if verdict == "faster":
        return f"{_digits(1 - high)} to {_percent(1 - low)}"
    if verdict == "slower" and ratio >= _MANIFOLD:
        return f"{_times(low)} to {_times(high)}" if _is_shown(interval) else ""
    if verdict == "slower" and _is_shown(interval):
        return f"{_digits(low - 1)} to {_percent(high - 1)}"
    shown = interval_text(interval) if verdict != "slower" else ""
    return f"{shown} time" if shown else ""


def _is_shown(interval: tuple[float, float]) -> bool:
    """Return whether an interval is narrow enough to say something."""
    low, high = interval
    return high <= low * (_NARROW if high >= _BEYOND else _WIDEST)


def _times(factor: float) -> str:
    """Return `1.04x`, `1.5x`, `45x`."""
    places = 2 if factor < 1.095 else 1 if factor < 9.95 else 0
    return f"{factor:,.{places}f}x"


def _digits(fraction: float) -> str:
    """Return a fraction in percent, without the sign: `2.1`, `34`, `99.2`."""
    percent = 100 * fraction
    fine = abs(percent) < 9.95 or 95 < percent < 100
    return f"{percent:,.{1 if fine else 0}f}"


def _percent(fraction: float) -> str:
    return f"{_digits(fraction)} %"


def _change(ratio: float) -> str:
    """Return `-34 %`, `+2.1 %`, `0.0 %`."""
    text = _percent(ratio - 1)
    return text if text.startswith("-") or text == "0.0 %" else f"+{text}"
