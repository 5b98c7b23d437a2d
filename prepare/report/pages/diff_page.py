"""The page of two compared jobs, audits or recipes: both sides, then a table for each part."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from prepare.core.utils import files
from prepare.core.utils.text import plural
from prepare.report.pages.long_table import LongTable, long_table
from prepare.report.pages.page import page
from prepare.report.pages.section import PageSection
from prepare.report.render import render

if TYPE_CHECKING:
    from collections.abc import Iterable

    from prepare.report.compare_runs import Change, Differences

_TITLES = {
    "recipe": "Recipe",
    "command line": "Command line",
    "audit": "Audit",
    "environment": "Environment",
}


def write_diff_page(differences: Differences, path: Path) -> None:
    """Write the page. Raises FileError."""
    files.write_text(path, diff_page(differences))


def diff_page(differences: Differences) -> str:
    """Return the page; the same differences give the same bytes."""
    sections = []
    if differences.figures:
        sections.append(_section("figures", "Side by side", differences.figures))
    for part in differences.parts:
        # The table side by side shows the results.
        if part.title != "results":
            title = f"{_TITLES[part.title]}: {plural(len(part.changes), 'difference')}"
            every = part.changes if len(part.groups) < len(part.changes) else ()
            name = part.title.replace(" ", "-")
            sections.append(_section(name, title, part.groups, every))
    if not differences.total:
        text = render("diff/nothing.html", kind=differences.kind)
        sections.insert(0, PageSection("nothing", "No difference", Markup(text)))  # noqa: S704
    total = plural(differences.total, "difference") if differences.total else "no difference"
    text = render("diff/sides.html", first=differences.first, second=differences.second)
    return page(
        differences.gist.replace("->", "→") or total,
        sections,
        verdict=total if differences.gist else "",
        lead=Markup(text),  # noqa: S704  rendered with escaping
        about=(f"comparison of two {differences.kind}s",),
    )


def _section(
    name: str, title: str, changes: Iterable[Change], every: Iterable[Change] = ()
) -> PageSection:
    tables = [_table(rows) for rows in (changes, every)]
    text = render("diff/part.html", title=title, table=tables[0], every=tables[1])
    return PageSection(name, title, Markup(text))  # noqa: S704  rendered with escaping


def _table(changes: Iterable[Change]) -> LongTable:
    rows: Iterable[tuple[Any, ...]] = (
        (c.name, c.first, c.second, _comparison(c), c.note) for c in changes
    )
    side: list[tuple[str, str]] = [("A", "prose"), ("B", "prose")]
    return long_table(
        [("Item", "name"), *side, ("Difference", "word"), ("Note", "prose")], rows, ""
    )


def _comparison(change: Change) -> str:
    if change.is_same:
        return "same"
    return "only in B" if not change.first else "only in A" if not change.second else "differs"
