"""The layout flow as a picture: the module tree with output layouts, breaks and copied bytes."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from markupsafe import Markup

from prepare.core.utils import files
from prepare.core.utils.text import plural, size
from prepare.flow.strip import LayoutStrip, layout_strip
from prepare.report.charts.flow_text import cut, details, events_text, layouts, title, width_of
from prepare.report.charts.module_rows import ModuleRow, rows
from prepare.report.render import render
from prepare.report.sentences import flow_sentence

if TYPE_CHECKING:
    from prepare.flow.records import Flow

# A picture with more rows is not readable.
LIMIT = 120
# A letter besides the colour, as not everyone can distinguish the colours.
LETTERS = {
    "channels_last": "L",
    "channels_last_3d": "L",
    "contiguous": "C",
    "ambiguous": "A",
    "other": "O",
    "none": "",
}
_MEANINGS = {
    "ambiguous": "ambiguous: satisfies several layouts",
    "other": "other: no known layout",
    "none": "not seen: not called, or returned no 4-d or 5-d tensor",
}

# With fewer rows the picture needs no overview.
_OVERVIEW = 25

# In pixels. Names have a monospaced font, so their width is known.
_WIDTH, _ROW = 900, 22
_NAME, _EVENT, _BYTES = 46, 470, 752
_INDENT, _DEEPEST = 13, 12
_LETTER, _WORD, _BOLD = 7.0, 6.6, 7.2
_BAR = 66


@dataclass(frozen=True, slots=True)
class _DrawnRow:
    """A row for the template: positions in pixels, shortened texts."""

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
    """Return the picture as an SVG file; `beside` is another flow of the model, for equal rows."""
    headline = textwrap.wrap(flow_sentence(flow)[:400], 88)[:4]
    return render("flow_picture.svg", **_context(flow, beside, limit, headline), name="flow")


def flow_figure(flow: Flow, *, name: str, beside: Flow | None = None) -> Markup:
    """Return the picture as part of a page, without headline; `name` is unique on the page."""
    text = render("flow_picture.svg", **_context(flow, beside, LIMIT, []), name=name)
    return Markup(text)  # noqa: S704  rendered by a template that escapes


def flow_strip(flow: Flow, *, name: str) -> Markup:
    """Return all modules side by side as part of a page; `name` is unique on the page."""
    width = 1000
    strip = layout_strip(flow, width=width, style=_style)
    text = render(
        "flow_strip.svg", sentence=flow_sentence(flow), strip=strip, width=width, name=name
    )
    return Markup(text)  # noqa: S704  rendered by a template that escapes


def flow_legend(flows: Iterable[Flow]) -> list[tuple[str, str, str]]:
    """Return (style, letter, meaning) of each layout in a strip, and of a tick."""
    flows = list(flows)
    entries = [entry for flow in flows for entry in _layouts_of(flow)]
    broken = any(event.kind == "break" for flow in flows for event in flow.events)
    return [*dict.fromkeys(entries), *([("tick", "", "lost here")] if broken else [])]


def write_flow_svg(flow: Flow, path: str | Path) -> None:
    """Write `flow.svg`; the same flow gives the same bytes. Raises FileError."""
    files.write_text(path, flow_svg(flow))


def _context(flow: Flow, beside: Flow | None, limit: int, headline: list[str]) -> dict:
    shown = rows(flow, limit=limit, beside=beside)
    lines = [cut(text, 128) for text in details(flow, shown)]
    overview = LayoutStrip([], [])
    if len(shown) > _OVERVIEW:
        overview = layout_strip(flow, width=_WIDTH - 32, style=_style)
    legend = _legend(flow)
    at = {"headline": 28, "details": 26 + 21 * len(headline)}
    at["strip"] = at["details"] + 18 * len(lines) + 6
    at["legend"] = at["strip"] + (40 if overview.parts else 4)
    at["rows"] = at["legend"] + 20 * len(legend) + 24
    most = max((row.totals.copied for row in shown), default=0)
    return {
        "sentence": flow_sentence(flow),
        "headline": headline,
        "details": lines,
        "strip": overview,
        "legend": legend,
        "rows": [_drawn(row, at["rows"] + _ROW * n, most) for n, row in enumerate(shown)],
        "at": at,
        "width": _WIDTH,
        "height": at["rows"] + _ROW * len(shown) + 14,
        "row_height": _ROW,
        "columns": {"name": _NAME, "event": _EVENT, "bytes": _BYTES},
    }


def _legend(flow: Flow) -> list[list[tuple[str, str, str]]]:
    """Return lines of (style, letter, meaning): first the layouts, then the marks."""
    kinds = {event.kind for event in flow.events}
    marks = [("break", "", "lost here")] if "break" in kinds else []
    marks += [("regain", "", "regained here")] if "regain" in kinds else []
    return [
        _layouts_of(flow),
        [*marks, ("holds", "", "contains other modules: the layout of its output")],
    ]


def _layouts_of(flow: Flow) -> list[tuple[str, str, str]]:
    """Return (style, letter, meaning) of each layout of the modules."""
    seen = {module.layout for module in flow.modules}
    known = [layout for layout in LETTERS if layout in seen]
    entries = [(_style(name), LETTERS[name], _MEANINGS.get(name, name)) for name in known]
    return entries if seen <= LETTERS.keys() else [*entries, ("odd", "?", "unknown layout")]


def _style(layout: str) -> str:
    """Return the style of a layout; both channels-last formats share one, as no tensor has both."""
    if layout in ("channels_last", "channels_last_3d"):
        return "last"
    return layout if layout in LETTERS else "odd"


def _drawn(row: ModuleRow, y: int, most: int) -> _DrawnRow:
    x = _NAME + _INDENT * min(row.depth, _DEEPEST)
    mark = next((word for word in ("break", "regain") if row.totals.events[word]), "")
    mark = "" if row.holds and not row.events else mark
    until = _EVENT if mark else _BYTES
    room = (until - 14 - x) / _LETTER
    label = row.label or (row.module.name if row.depth else row.module.type)
    kind, about = _about(row)
    name = cut(label or "the model", room)
    left = (room - width_of(name) - 1.5) * _LETTER / _WORD
    bar = _BAR * row.totals.copied / most if most else 0
    return _DrawnRow(
        y=y,
        x=x,
        name=name,
        type=cut(about, left) if about and left > 5 else "",
        title=title(row),
        swatch=_swatch(row),
        letter=_letter(row),
        kind=kind,
        mark=mark,
        text=cut(events_text(row), (_BYTES - _EVENT - 28) / _BOLD),
        bar=round(max(bar, 1.5), 1) if row.totals.copied else 0,
        copied=size(row.totals.copied) if row.totals.copied else "",
    )


def _about(row: ModuleRow) -> tuple[str, str]:
    if row.folded:
        return "folded", f"{plural(row.totals.modules, 'module')}, {layouts(row)}"
    kind = "holds" if row.holds else "leaf"
    return kind, row.module.type if row.depth else ""


def _swatch(row: ModuleRow) -> list[tuple[str, float, float]]:
    """Return (style, start, width) for each layout of the row; the widths add up to 1."""
    styles = Counter[str]()
    for layout, count in row.totals.layouts.items():
        styles[_style(layout)] += 0 if layout == "none" else count
    total, start, parts = styles.total(), 0.0, []
    for style, count in styles.most_common():
        if count:
            parts.append((style, round(start, 3), round(count / total, 3)))
            start += count / total
    return parts or [("none", 0.0, 1.0)]


def _letter(row: ModuleRow) -> str:
    layouts = [layout for layout in row.totals.layouts if layout != "none"]
    if len(set(map(_style, layouts))) > 1:
        return ""
    return LETTERS.get(layouts[0] if layouts else "none", "?")
