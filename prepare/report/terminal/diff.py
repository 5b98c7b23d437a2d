"""Print the differences of two runs, audits or recipes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prepare.core.utils.text import line, plural, printable

if TYPE_CHECKING:
    from prepare.report.compare_runs import Differences


def show_differences(found: Differences) -> None:
    """Prints one line for each difference, under its part where there are several parts."""
    headed = found.kind == "run"
    for part in found.parts:
        if headed:
            line(f"{part.title}: {plural(len(part.changes), 'difference')}")
        for change in part.changes:
            line(f"{'  ' * headed}{printable(change)}")
    line(plural(found.total, "difference") if found.total else "no difference")
