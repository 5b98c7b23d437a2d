"""Terminal output of a layout flow: one sentence and a short table."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from rich.table import Table

from prepare.core.utils.text import line, plural, printable, size
from prepare.flow.causes import event_name
from prepare.report.sentences import flow_sentence
from prepare.report.terminal.console import show_table

if TYPE_CHECKING:
    from prepare.flow.records import Event, Flow

_SHOWN = 10


def show_flow(flow: Flow, folder: str = "") -> None:
    """Print the sentence, the largest breaks, the notes and the path of the record."""
    line(f"layout flow ({flow.mode}): {flow_sentence(flow)}")
    summary = flow.summary
    wanted = ", ".join(f"{name} for {rank}-d tensors" for rank, name in flow.wanted.items())
    line(f"  wanted: {wanted}")
    if summary["convolutions"]:
        kinds = Counter(row.backend for row in flow.convolutions if row.backend)
        backends = ", ".join(f"{name} {count}" for name, count in sorted(kinds.items()))
        text = f"{summary['in_layout']} of {plural(summary['convolutions'], 'convolution')} returned it"
        line(f"  {text} ({backends})")
    breaks = [event for event in flow.events if event.kind == "break"]
    if breaks:
        _show_breaks(breaks)
    for note in flow.notes:
        line(f"  note: {printable(note)}")
    if folder:
        line(f"  details are in {printable(folder)}")


def _show_breaks(breaks: list[Event]) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for title in ("lost in", "by", "at", "times", "size"):
        table.add_column(title, overflow="fold", justify="right" if title == "times" else "left")
    ranked = sorted(breaks, key=lambda event: -event.bytes)  # stable: keeps the order of calls
    for event in ranked[:_SHOWN]:
        table.add_row(*map(printable, _cells(event)))
    show_table(table)
    if len(ranked) > _SHOWN:
        line(f"... and {plural(len(ranked) - _SHOWN, 'place')} more")


def _cells(event: Event) -> tuple[Any, ...]:
    cause = event_name(event) + ("" if event.phase == "forward" else ", backward")
    module = event.module or "the model itself"
    operand = event.operand.rpartition("; ")[2] if "; " in event.operand else ""
    place = ", ".join(filter(None, (event.source, operand)))
    return module, cause, place, event.count, size(event.bytes)
