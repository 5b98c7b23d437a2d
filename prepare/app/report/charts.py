"""Charts as SVG: bars with intervals, and points in a plane, over scales with round ticks."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from prepare.app.report.render import render
from prepare.core.document import MARKS, Axis, Bar, Bars, Chart, Plane, Point
from prepare.core.utils.text import printable

if TYPE_CHECKING:
    from prepare.core.utils.numbers import Interval

Box = tuple[float, float, float, float]  # left, top, right, bottom
# In pixels. As wide as a phone, so that a text of 13 pixels is readable there.
WIDTH, _LETTER = 400, 6.7
_ROW, _BAR = 46, 14
_HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 300, 46, 12, 40, 52
_ZERO = 26
# A value is an outlier from so many times the median on.
_OUTLIER = 3.0


def figure(chart: Chart, *, name: str) -> Markup:
    """Return a chart as part of a page; `name` is unique on the page."""
    template = "bars.svg" if isinstance(chart, Bars) else "plane.svg"
    text = render(template, **laid_out(chart), name=name, title=chart.title, width=WIDTH)
    return Markup(text)  # noqa: S704  rendered by a template that escapes


def laid_out(chart: Chart) -> dict[str, Any]:
    """Return the context of the template: positions in pixels from the top left, and the height."""
    rows = chart.rows if isinstance(chart, Bars) else chart.points
    desc = "; ".join(f"{row.label}: {row.text}" for row in rows)
    return {"desc": desc, **(_bars(chart) if isinstance(chart, Bars) else _plane(chart))}


def _bars(chart: Bars) -> dict:
    values = [bar.value for bar in chart.rows if bar.value is not None]
    ends = [bar.interval[1] for bar in chart.rows if bar.interval]
    scale = Scale(0.0, sensible_end(values, ends), 0.5, WIDTH - 0.5)
    return {
        "rows": [_bar(bar, _ROW * at, scale) for at, bar in enumerate(chart.rows)],
        "base": None if chart.baseline is None else scale(chart.baseline),
        "height": _ROW * len(chart.rows) + 2,
    }


def _plane(chart: Plane) -> dict:
    right, bottom = WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    ends = [point.x_interval[1] for point in chart.points if point.x_interval]
    end = sensible_end([point.x for point in chart.points], ends)
    across = _scale(chart.x, [end], _LEFT, right)
    up = _scale(chart.y, [point.y for point in chart.points], bottom, _TOP)
    points = [_point(point, across, up) for point in chart.points]
    return {
        "points": points,
        "labels": _labels(points),
        "x": _axis(chart.x, across),
        "y": _axis(chart.y, up),
        "box": {"left": _LEFT, "right": right, "top": _TOP, "bottom": bottom},
        "height": _HEIGHT,
    }


def _bar(bar: Bar, top: int, scale: Scale) -> dict:
    room = (WIDTH - 12) / _LETTER - width_of(bar.text)
    interval = bar.interval and tuple(map(scale, bar.interval))
    return {
        "label": cut(bar.label, max(room, 8)),
        "text": bar.text,
        "title": f"{bar.label}: {bar.text}",
        "mark": _mark(bar.mark),
        "y": top,
        "bar": top + 22,
        "high": _BAR,
        "wide": None if bar.value is None else scale(bar.value),
        "interval": interval,
        "beyond": _leaves(scale, bar.value, bar.interval),
    }


def _scale(axis: Axis, values: Iterable[float], start: float, end: float) -> Scale:
    lines = (value for value, _ in axis.lines)
    return scale_over([*values, *lines], start, end, log=axis.log, room_for_zero=_ZERO)


def _axis(axis: Axis, scale: Scale) -> dict:
    lines = [(scale(value), label) for value, label in axis.lines]
    return {
        "label": axis.label,
        "ticks": [(scale(value), number(value)) for value in scale.ticks()],
        "lines": lines,
    }


def _point(point: Point, across: Scale, up: Scale) -> dict:
    return {
        "label": cut(point.label, 26),
        "title": f"{point.label}: {point.text}",
        "mark": _mark(point.mark),
        "x": across(point.x),
        "y": up(point.y),
        "interval": point.x_interval and tuple(map(across, point.x_interval)),
        "beyond": _leaves(across, point.x, point.x_interval),
    }


def _leaves(scale: Scale, value: float | None, interval: Interval) -> bool:
    """Return whether a value or the end of its interval is beyond the scale; an arrow shows that."""
    return max(value or 0.0, interval[1] if interval else 0.0) > scale.high


def _mark(mark: str) -> str:
    return mark if mark in MARKS else "same"


def _labels(points: list[dict]) -> list[tuple[float, float, str, str]]:
    """Return (x, y, anchor, text) of each label that overlaps no point and no other label.

    A label without room is cut to its first word, such as the number of a row.
    """
    taken = [(p["x"] - 7, p["y"] - 7, p["x"] + 7, p["y"] + 7) for p in points]
    placed = []
    for point in points:
        texts = dict.fromkeys((point["label"], *point["label"].split()[:1]))
        for text, (x, y, anchor) in product(texts, _places(point)):
            long = width_of(text) * _LETTER
            left = x - {"start": 0, "middle": long / 2, "end": long}[anchor]
            box = (left, y - 11, left + long, y + 3)
            across, up = box[0] >= _LEFT and box[2] <= WIDTH, box[1] >= _TOP - 14
            inside = across and up and box[3] <= _HEIGHT - _BOTTOM
            if inside and not any(_overlap(box, other) for other in taken):
                taken.append(box)
                placed.append((x, y, anchor, text))
                break
    return placed


def _places(point: dict) -> list[tuple[float, float, str]]:
    """Return places above, below, right and left; the last two are outside the interval."""
    x, y = point["x"], point["y"]
    low, high = point["interval"] or (x, x)
    return [
        (x, y - 12, "middle"),
        (x, y + 21, "middle"),
        (max(high, x) + 10, y + 4, "start"),
        (min(low, x) - 10, y + 4, "end"),
        (x, y - 12, "start"),
        (x, y - 12, "end"),
        *((x + dx, y + dy, "middle") for dy in (-28, 36, -44, 52, -60, 68) for dx in (0, -60, 60)),
    ]


def _overlap(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


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


def cut(text: str, room: float) -> str:
    """Shorten a text to a width of `room` letters; leave its middle out. Wide letters count twice."""
    text = printable(text[:6000])
    if width_of(text) <= room:
        return text
    head, tail = "", ""
    for letter in text:
        if width_of(head + letter) > room * 0.6 - 1:
            break
        head += letter
    for letter in reversed(text):
        if width_of(head) + width_of(tail + letter) > room - 1:
            break
        tail = letter + tail
    return f"{head}…{tail}"


def width_of(text: str) -> int:
    """Return the width of a text in letters; those of East Asian scripts count twice."""
    return sum(1 + (unicodedata.east_asian_width(letter) in "WF") for letter in text)
