"""Draw the parts of documents as HTML; of a long table the first rows, and the others as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, NamedTuple

from jinja2 import TemplateError
from markupsafe import Markup

from prepare.app.report.render import render, short
from prepare.core.document import MARKS, Bars, Charts, Document, Folded, Part, Table

# More rows than these make a page slow to open on a phone.
LIMIT = 2000
# Cut longer texts in the middle; the search finds only the remaining letters.
_LETTERS = 400
# A value is an outlier from so many times the median on.
_OUTLIER = 3.0
# Errors that a file of another version or of another program can raise.
MALFORMED = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, TemplateError)
# The field of a part, by the first of these names that it has, without which there is nothing to draw.
_CONTENT = ("charts", "rows", "texts", "text", "title")


class PageSection(NamedTuple):
    """A rendered section: its anchor, title and HTML."""

    name: str
    title: str
    body: Markup


class LongTable(NamedTuple):
    """The first rows of a table as texts, the others as JSON for a page's script, and their number."""

    rows: list[list[str]]
    rest: Markup | None
    total: int


def sections(documents: Iterable[Document], problems: list[str]) -> Iterable[PageSection]:
    """Yield the sections of documents, in the order of a page.

    Leave out a document that cannot be drawn, and add a sentence to `problems`.
    """
    for document in sorted(documents, key=lambda each: each.place):
        if not document.title:
            continue
        try:
            if body := section_body(document):
                yield PageSection(document.name, document.title, body)
        except MALFORMED as error:
            problems.append(unexpected(document.title, error))


def unexpected(where: str, error: Exception) -> str:
    """Return the sentence on a file that cannot be drawn."""
    return f"{where}: a file has unexpected content ({type(error).__name__}: {error})"


def section_body(document: Document) -> Markup:
    """Return the parts of a document as HTML."""
    return drawn(document.shown("page"), document.name)


def drawn(parts: Iterable[Part], name: str, *, level: int = 3, folded: bool = False) -> Markup:
    """Return parts as HTML, without the empty ones; their titles are headings of this level."""
    shown = [_drawn(part, f"{name}-{at}") for at, part in enumerate(parts) if has_content(part)]
    # The template escapes.
    return Markup(render("document.html", parts=shown, level=level, folded=folded) if shown else "")  # noqa: S704


def has_content(part: Part) -> bool:
    """Return whether there is anything to draw of a part."""
    if isinstance(part, Folded):
        return any(map(has_content, part.parts))
    return bool(next(getattr(part, key) for key in _CONTENT if hasattr(part, key)))


def long_table(rows: Iterable[Sequence[Any]]) -> LongTable:
    """Return a table; each of `rows` has a value for every column, None for an empty cell."""
    cache: dict[Any, str] = {}
    texts = ([_text(value, cache) for value in row] for row in rows)
    first = list(islice(texts, LIMIT))
    rest = list(texts)
    return LongTable(first, _packed(rest) if rest else None, len(first) + len(rest))


def _drawn(part: Part, name: str) -> dict[str, Any]:
    """Return a part for the template: its kind, and its charts and tables as they are drawn."""
    shown: dict[str, Any] = {"kind": type(part).__name__, "part": part, "name": name}
    if isinstance(part, Charts):
        shown["charts"] = [(chart.title, *laid_out(chart)) for chart in part.charts]
    elif isinstance(part, Table):
        shown["table"] = long_table(part.rows)
    elif isinstance(part, Folded):
        shown["body"] = drawn(part.parts, name, folded=True)
    return shown


def laid_out(chart: Bars) -> tuple[float | None, list[dict[str, Any]]]:
    """Return the place of the baseline and the rows of a chart, in per cent of its width.

    A value out of all proportion leaves the chart, instead of pressing all others against 0.
    """
    values = sorted(bar.value for bar in chart.rows if bar.value is not None)
    most = max([*values, *(bar.interval[1] for bar in chart.rows if bar.interval)], default=0.0)
    end = min(most, _OUTLIER * values[(len(values) - 1) // 2] if values else 0.0) or most or 1.0

    def place(value: float) -> float:
        return round(min(max(value / end, 0.0), 1.0) * 100, 1)

    rows = []
    for bar in chart.rows:
        mark = bar.mark if bar.mark in MARKS else "same"
        row: dict[str, Any] = {"label": bar.label, "text": bar.text, "mark": mark, "whisker": None}
        row["wide"] = None if bar.value is None else place(bar.value)
        row["beyond"] = max(bar.value or 0.0, bar.interval[1] if bar.interval else 0.0) > end
        if bar.interval:
            low, high = map(place, bar.interval)
            row["whisker"] = (low, round(high - low, 1))
        rows.append(row)
    base = chart.baseline
    return None if base is None else place(base), rows


def _packed(rows: Iterable[list[str]]) -> Markup:
    """Return the rows as JSON: each text once, the cells as indices into the texts.

    Escape `<`, `>` and `&`, as the JSON is part of a page; JSON escapes all letters outside ASCII.
    """
    indices: dict[str, int] = {}
    cells = [indices.setdefault(text, len(indices)) for row in rows for text in row]
    data = json.dumps({"texts": list(indices), "cells": cells}, separators=(",", ":"))
    for sign in "<>&":
        data = data.replace(sign, f"\\u{ord(sign):04x}")
    return Markup(data)  # noqa: S704  escaped above


def _text(value: Any, cache: dict[Any, str]) -> str:
    """Return the text of a cell; cached, as most values of a long table repeat."""
    if isinstance(value, list):
        value = tuple(value)
    if value not in cache:
        text = ", ".join(map(str, value)) if isinstance(value, tuple) else value
        cache[value] = "" if text is None else short(text, _LETTERS)
    return cache[value]
