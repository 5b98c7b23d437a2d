"""The layout flow as one picture: the module tree, in which layout each gave, and where that is lost."""

from __future__ import annotations

import textwrap
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from markupsafe import Markup

from prepare.core.utils import files
from prepare.core.utils.text import plural, size
from prepare.report.charts.flow_text import cut, details, happened, layouts, title, wide
from prepare.report.charts.layout_strip import Ribbon, ribbon
from prepare.report.charts.module_rows import Row, rows
from prepare.report.render import render
from prepare.report.sentences import flow_sentence

if TYPE_CHECKING:
    from prepare.flow.records import Flow

# More rows than these are no picture any more.
LIMIT = 120
# A letter besides the colour, for everyone who cannot tell the colours apart.
LETTERS = {
    "channels_last": "L",
    "channels_last_3d": "L",
    "contiguous": "C",
    "ambiguous": "A",
    "other": "O",
    "none": "",
}
_MEANINGS = {
    "ambiguous": "ambiguous: can be read as either",
    "other": "other: in no known layout",
    "none": "not seen: not called, or gave no 4-d or 5-d tensor",
}

# Where there are fewer rows, the rows are overview enough.
_OVERVIEW = 25

# In pixels. Names are set in a monospaced font, so that their width is known.
_WIDTH, _ROW = 900, 22
_NAME, _EVENT, _BYTES = 46, 470, 752
_INDENT, _DEEPEST = 13, 12
_LETTER, _WORD, _BOLD = 7.0, 6.6, 7.2
_BAR = 66


@dataclass(frozen=True, slots=True)
class _Drawn:
    """A row as the template draws it: positions in pixels, texts cut to the room that they have."""

    y: int
    x: int
    name: str
    type: str
    title: str
    swatch: list[tuple[str, float, float]]
    letter: str
    kind: str
    mark: str
    text: str
    bar: float
    copied: str


def flow_svg(flow: Flow, *, beside: Flow | None = None, limit: int = LIMIT) -> str:
    """The picture as a file of its own; `beside` is a flow of the same model to compare it with."""
    headline = textwrap.wrap(flow_sentence(flow)[:400], 88)[:4]
    return render("flow_picture.svg", **_context(flow, beside, limit, headline), name="flow")


def flow_figure(flow: Flow, *, name: str, beside: Flow | None = None) -> Markup:
    """The picture as part of a page, which says the headline; `name` tells it from other pictures."""
    text = render("flow_picture.svg", **_context(flow, beside, LIMIT, []), name=name)
    return Markup(text)  # noqa: S704  rendered by a template that escapes


def write_flow_svg(flow: Flow, path: str | Path) -> None:
    """Writes `flow.svg`; the same flow gives the same bytes. Raises FileError."""
    files.write_text(path, flow_svg(flow))


def _context(flow: Flow, beside: Flow | None, limit: int, headline: list[str]) -> dict:
    shown = rows(flow, limit=limit, beside=beside)
    lines = [cut(text, 128) for text in details(flow, shown)]
    overview = Ribbon([], [])
    if len(shown) > _OVERVIEW:
        overview = ribbon(flow, width=_WIDTH - 32, style=_style)
    legend = _legend(flow)
    at = {"headline": 28, "details": 26 + 21 * len(headline)}
    at["ribbon"] = at["details"] + 18 * len(lines) + 6
    at["legend"] = at["ribbon"] + (40 if overview.parts else 4)
    at["rows"] = at["legend"] + 20 * len(legend) + 24
    most = max((row.sums.copied for row in shown), default=0)
    return {
        "sentence": flow_sentence(flow),
        "headline": headline,
        "details": lines,
        "ribbon": overview,
        "legend": legend,
        "rows": [_drawn(row, at["rows"] + _ROW * n, most) for n, row in enumerate(shown)],
        "at": at,
        "width": _WIDTH,
        "height": at["rows"] + _ROW * len(shown) + 14,
        "row_height": _ROW,
        "columns": {"name": _NAME, "event": _EVENT, "bytes": _BYTES},
    }


def _legend(flow: Flow) -> list[list[tuple[str, str, str]]]:
    """(what is drawn, its letter, what it means), in lines: first layouts, then marks."""
    seen = Counter(module.layout for module in flow.modules)
    words = [word for word in LETTERS if word in seen]
    layouts = [(_style(word), LETTERS[word], _MEANINGS.get(word, word)) for word in words]
    if any(word not in LETTERS for word in seen):
        layouts.append(("odd", "?", "a layout of no name here"))
    kinds = {event.kind for event in flow.events}
    marks = [("break", "", "lost here")] if "break" in kinds else []
    marks += [("regain", "", "regained here")] if "regain" in kinds else []
    return [layouts, [*marks, ("holds", "", "holds others: the layout that it gave in the end")]]


def _style(layout: str) -> str:
    """The style of a layout; both of channels-last are one colour: no tensor takes both."""
    if layout in ("channels_last", "channels_last_3d"):
        return "last"
    return layout if layout in LETTERS else "odd"


def _drawn(row: Row, y: int, most: int) -> _Drawn:
    x = _NAME + _INDENT * min(row.depth, _DEEPEST)
    mark = next((word for word in ("break", "regain") if row.sums.events[word]), "")
    mark = "" if row.holds and not row.events else mark
    until = _EVENT if mark else _BYTES
    room = (until - 14 - x) / _LETTER
    label = row.label or (row.module.name if row.depth else row.module.type)
    kind, about = _about(row)
    name = cut(label or "the model", room)
    left = (room - wide(name) - 1.5) * _LETTER / _WORD
    bar = _BAR * row.sums.copied / most if most else 0
    return _Drawn(
        y=y,
        x=x,
        name=name,
        type=cut(about, left) if about and left > 5 else "",
        title=title(row),
        swatch=_swatch(row),
        letter=_letter(row),
        kind=kind,
        mark=mark,
        text=cut(happened(row), (_BYTES - _EVENT - 28) / _BOLD),
        bar=round(max(bar, 1.5), 1) if row.sums.copied else 0,
        copied=size(row.sums.copied) if row.sums.copied else "",
    )


def _about(row: Row) -> tuple[str, str]:
    if row.folded:
        return "folded", f"{plural(row.sums.modules, 'module')}, {layouts(row)}"
    kind = "holds" if row.holds else "leaf"
    return kind, row.module.type if row.depth else ""


def _swatch(row: Row) -> list[tuple[str, float, float]]:
    """(style, from, width) of each part of the swatch, as parts of 1; one for each layout folded in."""
    seen = Counter[str]()
    for word, count in row.sums.layouts.items():
        seen[_style(word)] += 0 if word == "none" else count
    total, start, parts = seen.total(), 0.0, []
    for word, count in seen.most_common():
        if count:
            parts.append((word, round(start, 3), round(count / total, 3)))
            start += count / total
    return parts or [("none", 0.0, 1.0)]


def _letter(row: Row) -> str:
    words = {_style(word) for word in row.sums.layouts if word != "none"}
    if len(words) > 1:
        return ""
    word = next((word for word in row.sums.layouts if word != "none"), "none")
    return LETTERS.get(word, "?")
