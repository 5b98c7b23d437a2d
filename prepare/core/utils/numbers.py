"""Numbers for reading: times, ratios and intervals, and ratios of times in words."""

from __future__ import annotations

import math
from collections.abc import Callable

Interval = tuple[float, float] | None
# A wider interval, as a factor between its ends, is not printed.
_WIDEST = 4.0
# From this ratio on, a figure is printed only if its interval is narrower than this factor.
_BEYOND, _NARROW = 10.0, 1.5
# What records say, and what people read.
_DOUBTS = {
    "cannot tell": "unclear",
    "cannot predict": "unclear",
    "too noisy": "unclear",
    "not compared": "not measured",
}
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
    """Return `1.5x faster` or `1.2x slower`; another verdict in the words of readers.

    A large ratio with a wide interval is not a figure: `over 10x slower`, or the verdict alone. It has two
    places, `1.36x`, where one would lie outside of the interval.
    """
    if ratio is None or verdict not in ("faster", "slower"):
        return doubt(verdict)
    if verdict == "slower" and ratio >= _BEYOND and interval and not _is_shown(interval):
        return f"over {_BEYOND:g}x slower" if interval[0] >= _BEYOND else verdict
    factor, *ends = (r if verdict == "slower" else 1 / r for r in (ratio, *(interval or ())))
    is_outside = bool(ends) and not min(ends) <= round(factor, 1) <= max(ends)
    return f"{_times(factor, fine=is_outside)} {verdict}"


def speed_text(
    verdict: str,
    ratio: float | None,
    interval: Interval = None,
    *,
    time: float | None = None,
    confidence: float | None = 0.95,
) -> str:
    """Return the verdict with its figures: `1.3x faster, 163 instead of 214 ms (95 % interval: ...)`.

    `time` are the seconds that belong to the ratio. `unclear` has no times; a wide interval is left out, and
    any without `confidence`.
    """
    text = verdict_text(verdict, ratio, interval)
    if ratio is None or verdict not in ("faster", "slower", "no difference", "unclear"):
        return text
    if time is not None and verdict != "unclear":
        before = time / ratio
        text += f", {seconds(before) if verdict == 'no difference' else instead(time, before)}"
    if confidence is None or not (shown := interval_text(interval, verdict)):
        return text
    return f"{text} ({100 * confidence:g} % interval: {shown})"


def instead(after: float, before: float) -> str:
    """Return two times: `163 instead of 214 ms`, the unit once if it is the same."""
    first, second = seconds(after), seconds(before)
    figure, _, unit = first.partition(" ")
    return f"{figure if second.endswith(f' {unit}') else first} instead of {second}"


def interval_text(interval: Interval, verdict: str = "") -> str:
    """Return an interval of ratios: `1.22x to 1.37x faster`, `1.05x slower to 1.1x faster`.

    It is empty if it says nothing, and leaves out the word that `verdict` says.
    """
    if interval is None or not _is_shown(interval):
        return ""
    low, high = interval
    if high <= 1 or low >= 1:
        word, ends = ("faster", (1 / high, 1 / low)) if high <= 1 else ("slower", interval)
        text = " to ".join(_times(end, fine=True) for end in ends)
        return text if word == verdict else f"{text} {word}"
    return f"{_times(high, fine=True)} slower to {_times(1 / low, fine=True)} faster"


def doubt(status: str) -> str:
    """Return a status in one of the two words of doubt, `unclear` or `not measured`; others stay."""
    return _DOUBTS.get(status, status)


def noise_text(noise: float | None) -> str:
    """Return what the unprepared model shows against itself; empty if there is no interval."""
    if noise is None:
        return ""
    if noise > _LOUDEST:
        return "these times scatter too much to show a difference"
    return f"differences below {100 * (noise - 1):.1f} % are noise"


def _is_shown(interval: tuple[float, float]) -> bool:
    """Return whether an interval is narrow enough to say something."""
    low, high = interval
    return high <= low * (_NARROW if high >= _BEYOND else _WIDEST)


def _times(factor: float, *, fine: bool = False) -> str:
    """Return `1.04x`, `1.5x`, `45x`; a `fine` factor has two places below 10."""
    places = 2 if factor < (9.95 if fine else 1.095) else 1 if factor < 9.95 else 0
    return f"{factor:,.{places}f}x"
