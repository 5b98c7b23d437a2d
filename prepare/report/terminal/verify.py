"""A verification in the terminal: one sentence, what is wrong, and what to do; from its record alone."""

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


def show_verify(found: Verification, folder: str = "") -> None:
    """Prints the sentence, each check that did not pass, the culprit, the advice, and what casts lost."""
    line(f"verify ({found.level}): {verify_sentence(found)}")
    serious = [check for check in found.checks if check.status in _SERIOUS]
    if serious:
        _show_checks(serious)
    if found.culprit:
        line(f"  first went wrong in {printable(found.culprit)}")
    if found.advice:
        line(f"  {printable(found.advice)}")
    if found.lost:
        line(f"  {_lost(found.lost)}")
    if folder:
        line(f"  all of it is in {printable(folder)}")


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
    numbers = (_number(check.error), _number(check.allowed))
    return check.status, check.what, case, check.worst, *numbers


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2g}"


def _lost(lost: tuple[Lost, ...]) -> str:
    total: Counter[str] = Counter()
    for one in lost:
        total.update(overflowed=one.overflowed, flushed=one.flushed, rounded=one.rounded)
    words = {
        "overflowed": "became infinite",
        "flushed": "became zero",
        "rounded": "whole numbers were rounded",
    }
    said = ", ".join(f"{total[key]:,} {text}" for key, text in words.items() if total[key])
    return f"the casts: {said}, in {plural(len(lost), 'tensor')}, most of all {printable(lost[0].tensor)}"
