"""Terminal output of a tuning: one sentence and a table of the timed recipes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

from prepare.core.utils.text import line, plural, printable
from prepare.report.sentences import seconds, span, tune_sentence
from prepare.report.terminal.console import show_table

if TYPE_CHECKING:
    from prepare.tune.records import CandidateResult, Tuning

_TITLES = ("recipe", "time ratio", "interval", "error", "")
# Statuses that the figures in the table do not explain.
_EXPLAINED = ("wrong", "cannot tell", "failed", "not measured")


def show_tune(tuning: Tuning, file: str = "") -> None:
    """Print the sentence, the timed recipes, the reasons of the others, and the notes."""
    step = "training step" if tuning.mode == "train" else "inference"
    line(f"tune ({step}): {printable(tune_sentence(tuning))}")
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for title in _TITLES:
        right = title in ("time ratio", "error")
        table.add_column(title, overflow="fold", justify="right" if right else "left")
    for row in tuning.rows:
        if row.ratio is not None:
            table.add_row(*map(printable, _cells(row)))
    if table.row_count:
        show_table(table)
    reasons: dict[str, list[str]] = {}
    for row in tuning.rows:
        if row.status in _EXPLAINED:
            reasons.setdefault(f"{row.status}: {row.reason}", []).append(row.name)
    for reason, names in reasons.items():
        line(printable(f"  {', '.join(names)}: {reason}"))
    noise = "" if tuning.noise is None else f"; differences below {tuning.noise - 1:.1%} are noise"
    line(f"  {plural(tuning.rounds, 'round')} in {seconds(tuning.seconds)}{noise}")
    for note in tuning.notes:
        line(f"  note: {printable(note)}")
    if file:
        line(f"  details are in {printable(file)}")


def _cells(row: CandidateResult) -> tuple[str, ...]:
    return (
        row.name,
        "" if row.ratio is None else f"{row.ratio:.3f}",
        span(row.ratio_interval, lambda value: f"{value:.3f}"),
        "" if row.error is None else f"{row.error:.2g}",
        row.status,
    )
