"""The charts of a page as one PNG, where matplotlib is installed: for slides, and for what shows no SVG."""

from __future__ import annotations

import importlib.util
import io
import logging
import warnings
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prepare.core.utils import files
from prepare.core.utils.text import printable
from prepare.report.charts.chart import WIDTH, Bars, Chart, Plane, laid_out

if TYPE_CHECKING:
    from collections.abc import Iterator

_COLOURS = {
    "baseline": "#7b8794",
    "better": "#0072b2",
    "worse": "#c75300",
    "same": "#7b8794",
    "wrong": "#b3261e",
}
_SHAPES = {"worse": "D", "wrong": "x"}
_INK, _SOFT, _RULE = "#1c2430", "#566173", "#dde2ea"
# In pixels of the chart: how many make an inch, the room above each chart and around it.
_INCH, _TITLE, _GAP = 85, 36, 28


def write_png(charts: Sequence[Chart], path: str | Path) -> bool:
    """Writes the charts side by side; whether it did: without a matplotlib that works it writes nothing.

    The same charts give the same bytes with the same matplotlib. Raises FileError.
    """
    if not charts or importlib.util.find_spec("matplotlib") is None:
        return False
    try:
        with _quiet():
            data = _png(charts)
    except (
        Exception
    ):  # a matplotlib that is broken, or another one's: a picture is no reason to fail
        return False
    files.write_bytes(path, data)
    return True


@contextmanager
def _quiet() -> Iterator[None]:
    """It warns of fonts without a letter, and announces that it looks for fonts."""
    log = logging.getLogger("matplotlib")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)


def _png(charts: Sequence[Chart]) -> bytes:
    # Not pyplot: that keeps figures for the whole process, and may open a window.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = [[chart for chart in charts if isinstance(chart, kind)] for kind in (Bars, Plane)]
    columns = [[(chart.title, laid_out(chart)) for chart in column] for column in columns if column]
    high = max(sum(_high(drawn) for _, drawn in column) for column in columns)
    wide = WIDTH + _GAP
    figure = Figure(figsize=(len(columns) * wide / _INCH, high / _INCH))
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, wide * len(columns)), ylim=(high, 0))
    axes.set_axis_off()
    for at, column in enumerate(columns):
        top = 0
        for title, drawn in column:
            _Pen(axes, wide * at + _GAP / 2, top + _TITLE).draw(title, drawn)
            top += _high(drawn)
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=2 * _INCH, metadata={"Software": None})
    return file.getvalue()


def _high(drawn: dict[str, Any]) -> int:
    return _TITLE + drawn["height"] + _GAP


@dataclass(frozen=True, slots=True)
class _Pen:
    """Draws one chart, whose top left corner lies at `left` and `top`."""

    axes: Any
    left: float
    top: float

    def draw(self, title: str, drawn: dict[str, Any]) -> None:
        self.say(title, 0, -12, size=11, weight="bold")
        if "rows" in drawn:
            self.bars(drawn)
        else:
            self.plane(drawn)

    def bars(self, drawn: dict[str, Any]) -> None:
        for row in drawn["rows"]:
            middle = row["bar"] + row["high"] / 2
            if row["wide"] is not None:
                place = {"left": self.left, "height": row["high"], "color": _COLOURS[row["mark"]]}
                self.axes.barh(self.top + middle, row["wide"], **place)
            if drawn["base"] is not None and row["mark"] != "baseline":
                self.line((drawn["base"],) * 2, (middle - 11, middle + 11), style="--")
            self.whisker(row["interval"], middle)
            self.say(row["label"], 0, row["y"] + 15)
            self.say(row["text"], WIDTH, row["y"] + 15, ha="right")

    def plane(self, drawn: dict[str, Any]) -> None:
        box = drawn["box"]
        across, up = (box["left"], box["right"]), (box["top"], box["bottom"])
        for x, word in drawn["x"]["ticks"]:
            self.line((x, x), up, colour=_RULE)
            self.say(word, x, up[1] + 18, ha="center", color=_SOFT)
        for y, word in drawn["y"]["ticks"]:
            self.line(across, (y, y), colour=_RULE)
            self.say(word, across[0] - 7, y + 4, ha="right", color=_SOFT)
        for x, word in drawn["x"]["lines"]:
            self.line((x, x), up, style="--")
            self.say(word, x, up[0] - 5, ha="center", color=_SOFT)
        for y, word in drawn["y"]["lines"]:
            self.line(across, (y, y), style="--")
            self.say(word, across[0] + 5, y - 5, color=_SOFT)
        self.line((across[0], *across), (*up, up[1]))
        self.say(drawn["y"]["label"], 0, 14, color=_SOFT)
        self.say(
            drawn["x"]["label"], sum(across) / 2, drawn["height"] - 8, ha="center", color=_SOFT
        )
        for point in drawn["points"]:
            self.whisker(point["interval"], point["y"])
            self.point(point["x"], point["y"], point["mark"])
        for x, y, anchor, text in drawn["labels"]:
            ha = {"start": "left", "middle": "center", "end": "right"}[anchor]
            self.say(text, x, y, ha=ha)

    def point(self, x: float, y: float, mark: str) -> None:
        colour, face = _COLOURS[mark], "white" if mark == "baseline" else _COLOURS[mark]
        style = {"color": colour, "mfc": face, "ms": 8, "mew": 2, "zorder": 4}
        self.axes.plot(self.left + x, self.top + y, _SHAPES.get(mark, "o"), **style)

    def whisker(self, interval: tuple[float, float] | None, y: float) -> None:
        if interval:
            self.line(interval, (y, y), colour=_INK, over=3)
            for x in interval:
                self.line((x, x), (y - 4, y + 4), colour=_INK, over=3)

    def line(
        self, xs: Sequence[float], ys: Sequence[float], *,
        colour: str = _SOFT, style: str = "-", over: int = 2,
    ) -> None:  # fmt: skip
        places = [self.left + x for x in xs], [self.top + y for y in ys]
        self.axes.plot(*places, style, color=colour, lw=1.2, zorder=over)

    def say(self, text: str, x: float, y: float, *, size: float = 9, **style: Any) -> None:
        """A text; names hold anything, and a `$` in one begins no formula."""
        place = self.left + x, self.top + y
        style = {"color": _INK, "va": "baseline", "zorder": 5} | style
        self.axes.text(*place, printable(text)[:60], fontsize=size, parse_math=False, **style)
