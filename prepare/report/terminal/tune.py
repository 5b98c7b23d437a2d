"""A tuning in the terminal: one sentence, and a table of all candidates; made from its record alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

from prepare.core.utils.text import line, plural, printable
from prepare.report.sentences import seconds, span, tune_sentence
from prepare.report.terminal.console import show_table

if TYPE_CHECKING:
    from prepare.tune.records import Row, Tuning

_TITLES = ("recipe", "of the unprepared's", "interval", "error", "")
# Statuses that the figures in the table do not explain.
_EXPLAINED = ("wrong", "cannot tell", "failed", "not measured")


def show_tune(found: Tuning, file: str = "") -> None:
    """Prints the sentence, the candidates that were timed, why others were not or are out, and notes."""
    step = "training step" if found.mode == "train" else "inference"
    line(f"tune ({step}): {printable(tune_sentence(found))}")
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for title in _TITLES:
        right = title in ("of the unprepared's", "error")
        table.add_column(title, overflow="fold", justify="right" if right else "left")
    for row in found.rows:
        if row.ratio is not None:
            table.add_row(*map(printable, _cells(row)))
    if table.row_count:
        show_table(table)
    reasons: dict[str, list[str]] = {}
    for row in found.rows:
        if row.status in _EXPLAINED:
            reasons.setdefault(f"{row.status}: {row.reason}", []).append(row.name)
    for reason, names in reasons.items():
        line(printable(f"  {', '.join(names)}: {reason}"))
    noise = "" if found.noise is None else f"; less than {found.noise - 1:.1%} is noise"
    line(f"  {plural(found.rounds, 'round')} in {seconds(found.seconds)}{noise}")
    for note in found.notes:
        line(f"  note: {printable(note)}")
    if file:
        line(f"  all of it is in {printable(file)}")


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.name,
        "" if row.ratio is None else f"{row.ratio:.3f}",
        span(row.ratio_interval, lambda value: f"{value:.3f}"),
        "" if row.error is None else f"{row.error:.2g}",
        row.status,
    )
