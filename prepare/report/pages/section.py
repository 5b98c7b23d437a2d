"""Draw a document as the section of a page."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from jinja2 import TemplateError
from markupsafe import Markup

from prepare.core.document import Charts, Table
from prepare.report.charts.chart import figure
from prepare.report.pages.long_table import LongTable, long_table
from prepare.report.render import render

if TYPE_CHECKING:
    from prepare.core.document import Chart, Document, Part

Context = dict[str, Any]
T = TypeVar("T")
# Errors that a file of another version or of another program can raise.
MALFORMED = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, TemplateError)


@dataclass(frozen=True)
class PageSection:
    """A rendered section: its anchor, title and HTML."""

    name: str
    title: str
    body: Markup


def sections(documents: Iterable[Document], problems: list[str]) -> Iterable[PageSection]:
    """Yield the sections of documents, in the order of a page.

    Leave out a document that cannot be drawn, and add a sentence to `problems`.
    """
    for document in sorted(documents, key=lambda each: each.place):
        if not document.title:
            continue
        try:
            yield PageSection(document.name, document.title, section_body(document))
        except MALFORMED as error:
            reason = f"{type(error).__name__}: {error}"
            problems.append(f"{document.title}: a file has unexpected content ({reason})")


def section_body(document: Document) -> Markup:
    """Return the parts of a document as HTML."""
    parts = [_drawn(part, document.name, at) for at, part in enumerate(document.shown("page"))]
    text = render("document.html", parts=[part for part in parts if part["has_content"]])
    return Markup(text)  # noqa: S704  rendered by a template that escapes


def _drawn(part: Part, name: str, at: int) -> dict[str, Any]:
    """Return a part for the template: its kind, and its charts and tables as they are drawn."""
    kind = type(part).__name__
    drawn: dict[str, Any] = {
        "kind": kind,
        "part": part,
        "has_content": True,
        "name": f"{name}-{at}",
    }
    if isinstance(part, Charts):
        drawn["figures"] = [_figure(chart, f"{name}-{n}") for n, chart in enumerate(part.charts)]
        drawn["has_content"] = bool(part.charts)
    elif isinstance(part, Table):
        drawn["table"] = _table(part)
        drawn["has_content"] = bool(drawn["table"].total)
    elif hasattr(part, "texts"):
        drawn["has_content"] = bool(part.texts)
    elif hasattr(part, "nodes"):
        drawn["has_content"] = bool(part.nodes)
    elif hasattr(part, "rows"):
        drawn["has_content"] = bool(part.rows)
    return drawn


def _figure(chart: Chart, name: str) -> tuple[str, Markup]:
    return chart.title, figure(chart, name=name)


def _table(part: Table) -> LongTable:
    return long_table(part.columns, part.rows, part.file)


@dataclass(frozen=True)
class Section(Generic[T]):
    """A part of a page with a template of its own; `context` returns None if there is nothing to show."""

    name: str
    title: str
    context: Callable[[T], Context | None]


def rendered(
    record: T, wanted: Iterable[Section[T]], problems: list[str], *, folder: str
) -> Iterable[PageSection]:
    """Yield the sections that are not empty, rendered by their templates in `folder`.

    Leave out a section whose file is malformed, and add a sentence to `problems`.
    """
    for section in wanted:
        try:
            context = section.context(record)
            if context is None:
                continue
            text = render(f"{folder}/{section.name}.html", **context)
        except MALFORMED as error:
            reason = f"{type(error).__name__}: {error}"
            problems.append(f"{section.title}: a file has unexpected content ({reason})")
            continue
        yield PageSection(section.name, section.title, Markup(text))  # noqa: S704  rendered with escaping
