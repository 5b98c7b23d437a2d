"""Print the differences of two runs, audits or recipes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prepare.core.utils.text import line, plural, printable

if TYPE_CHECKING:
    from prepare.report.compare_runs import Differences


def show_differences(differences: Differences) -> None:
    """Print one line for each difference; for jobs, under the title of its part."""
    indented = differences.kind == "job"
    for part in differences.parts:
        if indented:
            line(f"{part.title}: {plural(len(part.changes), 'difference')}")
        for change in part.changes:
            line(f"{'  ' * indented}{printable(change)}")
    line(plural(differences.total, "difference") if differences.total else "no difference")
