"""Scales of a chart: from values to pixels, with round values as ticks."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

# A value is an outlier from so many times the median on.
_OUTLIER = 3.0


@dataclass(frozen=True, slots=True)
class Scale:
    """Map values from `low` to `high` to pixels from `start` to `end`.

    `zero` is the pixel of the value 0 on a logarithmic scale with such values, else None.
    """

    low: float
    high: float
    start: float
    end: float
    log: bool = False
    zero: float | None = None

    def __call__(self, value: float) -> float:
        """Return the pixel of a value; clip it to the ends of the scale."""
        if self.log and value <= 0:
            return self.start if self.zero is None else self.zero
        low, high = self._transform(self.low), self._transform(self.high)
        part = (self._transform(value) - low) / (high - low)
        return round(self.start + min(max(part, 0.0), 1.0) * (self.end - self.start), 1)

    def ticks(self) -> list[float]:
        """Return a few round values; 0 is one of them if it has a pixel."""
        ticks = _log_ticks(self.low, self.high) if self.log else _ticks(self.low, self.high)
        return [0.0, *ticks] if self.zero is not None else ticks

    def _transform(self, value: float) -> float:
        return math.log10(value) if self.log else value


def scale_over(
    values: Iterable[float], start: float, end: float, *, log: bool, room_for_zero: float
) -> Scale:
    """Return a scale for these values with a margin; it starts at 0, or below the smallest positive value."""
    values = list(values)
    if not log:
        return Scale(0.0, 1.12 * max(values, default=0.0) or 1.0, start, end)
    positive = [value for value in values if value > 0] or [1e-6, 1e-2]
    low, high = min(positive) / 2, max(positive) * 2
    if high / low < 100:
        middle = math.sqrt(low * high)
        low, high = middle / 10, middle * 10
    if all(value > 0 for value in values):
        return Scale(low, high, start, end, log=True)
    shift = math.copysign(room_for_zero, end - start)
    return Scale(low, high, start + shift, end, log=True, zero=start + shift * 0.3)


def sensible_end(values: Iterable[float], ends: Iterable[float]) -> float:
    """Return where a linear axis from 0 ends: at the largest value, unless one is out of all proportion.

    `ends` are those of intervals. An outlier leaves the axis instead of pressing all others against 0.
    """
    values = sorted(values)
    if not values:
        return 1.0
    most = max([*values, *ends])
    return min(most, _OUTLIER * values[(len(values) - 1) // 2]) or most or 1.0


def number(value: float) -> str:
    """Format the round value of a tick: `0.5`, `20`, `1e-6`."""
    if value == 0 or 1e-3 <= abs(value) < 1e4:
        return f"{value:g}"
    digits, _, power = f"{value:.1e}".partition("e")
    return f"{float(digits):g}e{int(power)}"


def _ticks(low: float, high: float) -> list[float]:
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= rough)
    first, last = math.ceil(low / step), math.floor(high / step)
    return [round(at * step, 12) for at in range(first, last + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    if last - first <= 2:
        ticks = [m * 10.0**at for at in range(first, last + 1) for m in (1, 2, 5)]
    else:
        stride = math.ceil((last - first) / 5)
        ticks = [10.0**at for at in range(first, last + 1) if at % stride == 0]
    return [value for value in ticks if low <= value <= high]
