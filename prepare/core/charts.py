"""Charts as plain data: bars with intervals, and points in a plane."""

from __future__ import annotations

from dataclasses import dataclass

Interval = tuple[float, float] | None
# The kinds of bars and points: the baseline, better (smaller), worse (larger), not different, and
# invalid because its outputs are wrong. Each has a colour; points also have a shape.
MARKS = ("baseline", "better", "worse", "same", "wrong")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One bar: a value of at least 0, or None if it is not known; `text` is the formatted value."""

    label: str
    value: float | None
    interval: Interval = None
    text: str = ""
    mark: str = "same"


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One point; `text` is the formatted position."""

    label: str
    x: float
    y: float
    x_interval: Interval = None
    text: str = ""
    mark: str = "same"


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One axis of a plane; `lines` are (value, label) of lines across it.

    A logarithmic axis starts with a separate place for 0; a linear axis starts at 0.
    """

    label: str
    log: bool = False
    lines: tuple[tuple[float, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Bars:
    """Horizontal bars from 0, one below the other."""

    title: str
    rows: tuple[Bar, ...]

    @property
    def baseline(self) -> float | None:
        """Return the value of the first bar that is marked as the baseline."""
        return next((bar.value for bar in self.rows if bar.mark == "baseline"), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plane:
    """Points in a plane."""

    title: str
    points: tuple[Point, ...]
    x: Axis
    y: Axis


Chart = Bars | Plane
