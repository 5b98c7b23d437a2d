"""Draw the parts of documents as HTML; of a long table the first rows, and the others as JSON."""

from __future__ import annotations

import json
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from jinja2 import TemplateError
from markupsafe import Markup

from prepare.app.report.charts import figure
from prepare.app.report.render import render, short
from prepare.core.document import Charts, Document, Folded, Part, Table

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

# More rows than these make a page slow to open on a phone.
LIMIT = 2000
# Cut longer texts in the middle; the search finds only the remaining letters.
_LETTERS = 400
# Errors that a file of another version or of another program can raise.
MALFORMED = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, TemplateError)
# The field of a part, by the first of these names that it has, without which there is nothing to draw.
_CONTENT = ("charts", "nodes", "rows", "texts", "text", "title")


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
        shown["figures"] = [
            (chart.title, figure(chart, name=f"{name}-{n}")) for n, chart in enumerate(part.charts)
        ]
    elif isinstance(part, Table):
        shown["table"] = long_table(part.rows)
    elif isinstance(part, Folded):
        shown["body"] = drawn(part.parts, name, folded=True)
    return shown


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
