"""The page of what differs: both sides beside each other, then a table for each part that differs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from prepare.core.utils import files
from prepare.core.utils.text import plural
from prepare.report.pages.long_table import grid
from prepare.report.pages.page import Part, page
from prepare.report.render import render

if TYPE_CHECKING:
    from collections.abc import Iterable

    from prepare.report.compare_runs import Change, Differences

_TITLES = {
    "recipe": "Recipe",
    "command line": "What was asked",
    "audit": "Audit",
    "environment": "Where it ran",
}


def write_diff_page(found: Differences, path: Path) -> None:
    """Writes the page. Raises FileError."""
    files.write_text(path, diff_page(found))


def diff_page(found: Differences) -> str:
    """The page; the same differences give the same bytes."""
    parts = []
    if found.figures:
        parts.append(_part("figures", "Side by side", found.figures))
    for part in found.parts:
        # What the runs came to stands side by side.
        if part.title != "results":
            title = f"{_TITLES[part.title]}: {plural(len(part.changes), 'difference')}"
            parts.append(_part(part.title.replace(" ", "-"), title, part.changes))
    if not found.total:
        nothing = render("diff/nothing.html", kind=found.kind)
        parts.insert(0, Part("nothing", "No difference", Markup(nothing)))  # noqa: S704
    title = plural(found.total, "difference") if found.total else "no difference"
    said = render("diff/sides.html", ours=found.ours, theirs=found.theirs)
    sides = Part("sides", "What was compared", Markup(said))  # noqa: S704  rendered with escaping
    return page(title, [sides, *parts], kind=f"two {found.kind}s compared")


def _part(name: str, title: str, changes: Iterable[Change]) -> Part:
    side: list[tuple[str, str]] = [("A", "prose"), ("B", "prose")]
    rows: Iterable[tuple[Any, ...]] = (
        (c.what, c.ours, c.theirs, _same(c), c.note) for c in changes
    )
    table = grid([("What", "name"), *side, ("Which", "word"), ("Note", "prose")], rows, "")
    text = render("diff/part.html", title=title, table=table)
    return Part(name, title, Markup(text))  # noqa: S704  rendered with escaping


def _same(change: Change) -> str:
    if change.ours == change.theirs:
        return "same"
    return "only in B" if not change.ours else "only in A" if not change.theirs else "differs"
