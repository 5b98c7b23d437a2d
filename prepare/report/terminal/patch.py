"""Terminal output of a patch: one sentence, the changed calls, and the breaks that stay."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

from prepare.core.utils.text import line, plural, printable, size
from prepare.report.sentences import patch_sentence
from prepare.report.terminal.console import show_table

if TYPE_CHECKING:
    from prepare.patch.records import Patch

_SHOWN = 10


def show_patch(patch: Patch, file: str) -> None:
    """Print the sentence, a line for each changed call and for each break that stays, and the file."""
    line(f"patch: {patch_sentence(patch)}")
    rows = [(call.source, size(call.copied_bytes), call.breaks, call.name) for call in patch.calls]
    _show_rows(("changed at", "saves", "breaks", "call"), rows)
    left = [(each.source, each.cause, each.breaks, each.reason) for each in patch.left]
    _show_rows(("stays at", "by", "breaks", "because"), left)
    if patch.diff:
        line(f"  git apply {printable(file)}, in the folder that holds the package")


def _show_rows(titles: tuple[str, ...], rows: list[tuple]) -> None:
    if not rows:
        return
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for title in titles:
        table.add_column(title, overflow="fold", justify="right" if title == "breaks" else "left")
    for row in rows[:_SHOWN]:
        table.add_row(*map(printable, row))
    show_table(table)
    if len(rows) > _SHOWN:
        line(f"... and {plural(len(rows) - _SHOWN, 'place')} more")
