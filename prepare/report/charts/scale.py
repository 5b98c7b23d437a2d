"""The scales of a chart: where a value lies in pixels, and which values get a tick."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Scale:
    """Values from `low` to `high` over the pixels from `start` to `end`; `zero` is where a 0 lies.

    That is None, but for a logarithmic scale with values that are 0.
    """

    low: float
    high: float
    start: float
    end: float
    log: bool = False
    zero: float | None = None

    def __call__(self, value: float) -> float:
        """Where a value lies, in pixels; at an end of the scale where it lies beyond."""
        if self.log and value <= 0:
            return self.start if self.zero is None else self.zero
        low, high = self._of(self.low), self._of(self.high)
        part = (self._of(value) - low) / (high - low)
        return round(self.start + min(max(part, 0.0), 1.0) * (self.end - self.start), 1)

    def ticks(self) -> list[float]:
        """A few round values, 0 among them where it has a place."""
        found = _log_ticks(self.low, self.high) if self.log else _ticks(self.low, self.high)
        return [0.0, *found] if self.zero is not None else found

    def _of(self, value: float) -> float:
        return math.log10(value) if self.log else value


def scale_over(
    values: Iterable[float], start: float, end: float, *, log: bool, room_for_zero: float
) -> Scale:
    """A scale that holds these values with some room; from 0, or from below the smallest positive one."""
    values = list(values)
    if not log:
        return Scale(0.0, 1.12 * max(values, default=0.0) or 1.0, start, end)
    positive = [value for value in values if value > 0] or [1e-6, 1e-2]
    low, high = min(positive) / 2, max(positive) * 2
    if high / low < 100:
        middle = math.sqrt(low * high)
        low, high = middle / 10, middle * 10
    if len([value for value in values if value <= 0]) == 0:
        return Scale(low, high, start, end, log=True)
    place = math.copysign(room_for_zero, end - start)
    return Scale(low, high, start + place, end, log=True, zero=start + place * 0.3)


def number(value: float) -> str:
    """A round value as it stands at a tick: `0.5`, `20`, `1e-6`."""
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
        found = [m * 10.0**at for at in range(first, last + 1) for m in (1, 2, 5)]
    else:
        stride = math.ceil((last - first) / 5)
        found = [10.0**at for at in range(first, last + 1) if at % stride == 0]
    return [value for value in found if low <= value <= high]
