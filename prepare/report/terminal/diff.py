"""Print the differences of two runs, audits or recipes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prepare.core.utils.text import line, plural, printable

if TYPE_CHECKING:
    from prepare.report.compare_runs import Differences


def show_differences(differences: Differences, *, all_changes: bool = False) -> None:
    """Print the gist and one line for each difference; `all_changes` does not group equal ones."""
    indented = differences.kind == "run"
    if differences.gist:
        line(printable(differences.gist))
    hidden = False
    for part in differences.parts:
        if indented:
            line(f"{part.title}: {plural(len(part.changes), 'difference')}")
        shown = part.changes if all_changes else part.groups
        hidden = hidden or len(shown) < len(part.changes)
        for change in shown:
            line(f"{'  ' * indented}{printable(change)}")
    total = plural(differences.total, "difference") if differences.total else "no difference"
    line(f"{total}; --all prints each tensor" if hidden else total)
