"""Terminal output of a tuning: one sentence and a table of the timed recipes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

from prepare.core.utils.speed import change_text, interval_text, noise_text, verdict_text
from prepare.core.utils.text import line, plural, printable
from prepare.report.kept_modules import kept_rows
from prepare.report.sentences import result_text, seconds, tune_sentence
from prepare.report.terminal.console import show_table

if TYPE_CHECKING:
    from prepare.tune.records import CandidateResult, Tuning

_TITLES = ("recipe", "speed", "time", "interval", "error", "result")
# Statuses that the figures in the table do not explain.
_EXPLAINED = ("wrong", "cannot tell", "failed", "not measured")


def show_tune(tuning: Tuning, file: str = "") -> None:
    """Print the sentence, the timed recipes, the reasons of the others, and the notes."""
    step = "training step" if tuning.mode == "train" else "inference"
    line(f"tune ({step}): {printable(tune_sentence(tuning))}")
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    compiled = any("compile" in row.steps for row in ranked(tuning))
    for title in (*_TITLES, *(["first call"] if compiled else [])):
        right = title in ("time", "error", "first call")
        table.add_column(title, overflow="fold", justify="right" if right else "left")
    for row in ranked(tuning):
        first = [] if row.first_seconds is None else [seconds(row.first_seconds)]
        table.add_row(*map(printable, [*_cells(row, tuning), *(first if compiled else [])]))
    if table.row_count:
        show_table(table)
    reasons: dict[str, list[str]] = {}
    for row in tuning.rows:
        if row.status in _EXPLAINED:
            reasons.setdefault(f"{row.status}: {row.reason}", []).append(row.name)
    for reason, names in reasons.items():
        line(printable(f"  {', '.join(names)}: {reason}"))
    for kept in kept_rows(tuning):
        line(printable(f"  {kept.sentence}"))
    parts = (
        f"{plural(tuning.rounds, 'round')} in {seconds(tuning.seconds)}",
        noise_text(tuning.noise),
    )
    line("  " + "; ".join(filter(None, parts)))
    for note in tuning.notes:
        line(f"  note: {printable(note)}")
    if file:
        line(f"  details are in {printable(file)}")


def ranked(tuning: Tuning) -> list[CandidateResult]:
    """Return the timed recipes: the winner first, then the others from the fastest to the slowest."""
    timed = [row for row in tuning.rows if row.ratio is not None]
    return sorted(timed, key=lambda row: (row.name != tuning.winner, row.ratio))


def _cells(row: CandidateResult, tuning: Tuning) -> tuple[str, ...]:
    verdict = tuning.verdict(row)
    return (
        row.name,
        "" if verdict == "baseline" else verdict_text(verdict, row.ratio, row.ratio_interval),
        "" if verdict == "baseline" else change_text(verdict, row.ratio),
        interval_text(row.ratio_interval),
        "" if row.error is None else f"{row.error:.2g}",
        result_text(row, tuning),
    )
