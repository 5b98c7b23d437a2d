"""Draw the parts of documents as HTML; escape all values and keep only printable text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from prepare.core.document import MARKS, Bars, Document, Folded, Part, Table
from prepare.core.utils.text import capitalized, printable

# More rows than these make a page slow to open on a phone; the table names the file that has all.
LIMIT = 2000
# Cut longer texts in the middle; the search finds only the remaining letters.
_LETTERS = 400
# A number with an exponent, and the places where a long name may break: `steps.repair_layout`.
_NUMBER = re.compile(r"\b\d+(?:\.\d+)?e[-+]\d+\b")
_BREAK = re.compile(r"(?<=[a-z_])[.=](?=[a-z_])")
FOLDER = Path(__file__).parent / "templates"


def render(template: str, **context: Any) -> str:
    """Render one template of this package; values of `context` are escaped."""
    return _TEMPLATES[template].render(context)


def sections(documents: Iterable[Document]) -> Iterator[dict[str, Any]]:
    """Yield the sections of documents that have a title and something to draw, in the order of a page."""
    for document in sorted(documents, key=lambda each: each.place):
        if document.title and (body := drawn(document.shown("page"), document.name)):
            yield {"name": document.name, "title": document.title, "body": body}


def drawn(parts: Iterable[Part], name: str, *, level: int = 3, folded: bool = False) -> Markup:
    """Return parts as HTML, without the empty ones; their titles are headings of this level."""
    shown = [_drawn(part, f"{name}-{at}") for at, part in enumerate(parts) if has_content(part)]
    # The template escapes.
    return Markup(render("document.html", parts=shown, level=level, folded=folded) if shown else "")  # noqa: S704


def has_content(part: Part) -> bool:
    """Return whether there is anything to draw of a part."""
    if isinstance(part, Folded):
        return any(map(has_content, part.parts))
    return bool(part.rows if hasattr(part, "rows") else part.text)


def _drawn(part: Part, name: str) -> dict[str, Any]:
    """Return a part for the template: its kind, and its bars, rows and parts as they are drawn."""
    shown: dict[str, Any] = {"kind": type(part).__name__, "part": part, "name": name}
    if isinstance(part, Bars):
        shown["base"], shown["rows"] = laid_out(part)
    elif isinstance(part, Table):
        shown["rows"] = [[_text(value) for value in row] for row in islice(part.rows, LIMIT)]
    elif isinstance(part, Folded):
        shown["body"] = drawn(part.parts, name, folded=True)
    return shown


def laid_out(chart: Bars) -> tuple[float | None, list[dict[str, Any]]]:
    """Return the place of the baseline and the rows of a chart, in per cent of its width."""
    ends = [bar.interval[1] if bar.interval else bar.value or 0.0 for bar in chart.rows]
    most = max([*ends, *(bar.value or 0.0 for bar in chart.rows)], default=0.0) or 1.0

    def place(value: float) -> float:
        return round(max(value / most, 0.0) * 100, 1)

    rows = []
    for bar in chart.rows:
        mark = bar.mark if bar.mark in MARKS else "same"
        row: dict[str, Any] = {"label": bar.label, "text": bar.text, "mark": mark, "whisker": None}
        row["wide"] = None if bar.value is None else place(bar.value)
        if bar.interval:
            low, high = map(place, bar.interval)
            row["whisker"] = (low, round(high - low, 1))
        rows.append(row)
    return next((row["wide"] for row in rows if row["mark"] == "baseline"), None), rows


def _text(value: Any) -> str:
    """Return the text of a cell; that of a list or tuple has its items."""
    if isinstance(value, (list, tuple)):
        value = ", ".join(map(str, value))
    return "" if value is None else short(value, _LETTERS)


def printable_value(value: Any) -> Any:
    """Return what a template prints of a value: nothing for None, only printable letters of a text.

    XML and UTF-8 cannot hold control characters and lone surrogates. Line ends stay.
    """
    if isinstance(value, str) and not isinstance(value, Markup) and not value.isprintable():
        return "\n".join(map(printable, value.splitlines()))
    return "" if value is None else value


def short(value: Any, limit: int = 120) -> str:
    """Return a text of at most `limit` letters, with its middle left out if it is longer."""
    text = printable(str(value)[: 4 * limit] + str(value)[4 * limit :][-limit:])
    if len(text) <= limit:
        return text
    return f"{text[: limit * 2 // 3]}…{text[limit * 2 // 3 + 1 - limit :]}"


def breakable(text: str) -> Markup:
    """Return a text that may break after a dot or `=` in a name, and not within a number."""
    marked = _BREAK.sub(r"\g<0><wbr>", str(escape(printable(text))))
    return Markup(_NUMBER.sub(r'<span class="whole">\g<0></span>', marked))  # noqa: S704  escaped above


def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(FOLDER),
        autoescape=True,
        finalize=printable_value,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "breakable": breakable,
        "count": lambda number: f"{number:,}",
        "capitalized": capitalized,
        "short": short,
    }
    return environment


# Compiled with this module, which a sweep loads once for all of its runs.
_ENVIRONMENT = _environment()
_NAMES = _ENVIRONMENT.list_templates(["html", "css"])
_TEMPLATES = {name: _ENVIRONMENT.get_template(name) for name in _NAMES}
