"""Terminal output of a verification: one sentence, the failed checks and a remedy."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from rich.table import Table

from prepare.core.utils.text import line, plural, printable
from prepare.report.sentences import verify_sentence
from prepare.report.terminal.console import show_table

if TYPE_CHECKING:
    from prepare.verify.records import Check, Lost, Verification

_SHOWN = 10
_SERIOUS = ("fail", "wrong", "cannot tell")


def show_verify(verification: Verification, folder: str = "") -> None:
    """Print the sentence, the checks that did not pass, the culprit, the advice and the casts' losses."""
    line(f"verify ({verification.level}): {verify_sentence(verification)}")
    serious = [check for check in verification.checks if check.status in _SERIOUS]
    if serious:
        _show_checks(serious)
    if verification.culprit:
        line(f"  the first difference is in {printable(verification.culprit)}")
    if verification.advice:
        line(f"  {printable(verification.advice)}")
    if verification.lost:
        line(f"  {_lost(verification.lost)}")
    if folder:
        line(f"  details are in {printable(folder)}")


def _show_checks(checks: list[Check]) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for title in ("status", "what", "case", "worst", "error", "allowed"):
        table.add_column(title, overflow="fold")
    ranked = sorted(checks, key=lambda check: _SERIOUS.index(check.status))  # stable
    for check in ranked[:_SHOWN]:
        table.add_row(*map(printable, _cells(check)))
    show_table(table)
    if len(ranked) > _SHOWN:
        line(f"... and {plural(len(ranked) - _SHOWN, 'check')} more")


def _cells(check: Check) -> tuple[Any, ...]:
    batch = f"batch {check.batch}" if check.batch else ""
    case = ", ".join(filter(None, (check.mode, batch, check.inputs)))
    errors = (_number(check.error), _number(check.allowed))
    return check.status, check.what, case, check.worst, *errors


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2g}"


def _lost(losses: tuple[Lost, ...]) -> str:
    total: Counter[str] = Counter()
    for loss in losses:
        total.update(overflowed=loss.overflowed, flushed=loss.flushed, rounded=loss.rounded)
    effects = {
        "overflowed": "became infinite",
        "flushed": "became zero",
        "rounded": "whole numbers were rounded",
    }
    counts = ", ".join(f"{total[key]:,} {text}" for key, text in effects.items() if total[key])
    worst = printable(losses[0].tensor)
    return f"casts: {counts}, in {plural(len(losses), 'tensor')}, most in {worst}"
