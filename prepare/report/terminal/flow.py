"""The layout flow in the terminal: one sentence, and a short table; made from its records alone."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from rich.table import Table

from prepare.core.utils.text import line, plural, printable, size
from prepare.report.terminal.console import show_table

if TYPE_CHECKING:
    from prepare.flow.records import Event, Flow

_SHOWN = 10
# What a user can do about a cause, where there is one thing to do.
_REMEDIES = {
    "instance_norm": "try +steps.repair_layout={}",
    "conv3d_reference": "try a batch of 2 or more, or bfloat16",
    "odd_stride": "format the input with +steps.input_format={}",
    "pool3d": "try max_pool3d, or a convolution with stride 2",
    "cat": "bring every operand into the layout before it",
    "add": "put the operand that is in the layout first",
}


def flow_sentence(flow: Flow) -> str:
    """One sentence: `13 breaks, all InstanceNorm3d, 4.3 MiB copied per forward: try ...`."""
    if flow.status != "ok":
        return f"{flow.status}: {printable(flow.reason)}"
    found = flow.summary
    parts = [_breaks(flow.events, "forward", "break")]
    parts.append(f"{size(found['copied_bytes'])} copied per forward")
    back = found["backward"]
    if back["breaks"] or back["copied_bytes"]:
        parts.append(f"{_breaks(flow.events, 'backward', 'break')} in backward")
        parts.append(f"{size(back['copied_bytes'])} copied per backward")
    remedy = next((_REMEDIES[word] for word in found["by_cause"] if word in _REMEDIES), "")
    return ", ".join(parts) + (f": {remedy}" if remedy else "")


def show_flow(flow: Flow, folder: str = "") -> None:
    """Prints the sentence, the places where most is lost, and where all of it is."""
    line(f"layout flow ({flow.mode}): {flow_sentence(flow)}")
    found = flow.summary
    wanted = ", ".join(f"{name} for {rank}-d tensors" for rank, name in flow.wanted.items())
    line(f"  wanted: {wanted}")
    if found["convolutions"]:
        kinds = Counter(row.backend for row in flow.convolutions if row.backend)
        backends = ", ".join(f"{name} {count}" for name, count in sorted(kinds.items()))
        text = f"{found['in_layout']} of {plural(found['convolutions'], 'convolution')} gave it"
        line(f"  {text} ({backends})")
    breaks = [event for event in flow.events if event.kind == "break"]
    if breaks:
        _show_breaks(breaks)
    for note in flow.notes:
        line(f"  note: {printable(note)}")
    if folder:
        line(f"  all of it is in {printable(folder)}")


def _show_breaks(breaks: list[Event]) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for title in ("lost in", "type", "by", "at", "times", "size"):
        table.add_column(title, overflow="fold", justify="right" if title == "times" else "left")
    ranked = sorted(breaks, key=lambda event: -event.bytes)  # stable: the first seen comes first
    for event in ranked[:_SHOWN]:
        table.add_row(*map(printable, _cells(event)))
    show_table(table)
    if len(ranked) > _SHOWN:
        line(f"... and {plural(len(ranked) - _SHOWN, 'place')} more")


def _cells(event: Event) -> tuple[Any, ...]:
    by = event.cause if event.phase == "forward" else f"{event.cause} (backward)"
    where = event.module or "the model itself"
    why = event.operand.rpartition("; ")[2] if "; " in event.operand else ""
    which = ", ".join(filter(None, (event.source, why)))
    return where, event.type, by, which, event.count, size(event.bytes)


def _breaks(events: tuple[Event, ...], phase: str, kind: str) -> str:
    """`13 breaks, all InstanceNorm3d`, `16 breaks (13 InstanceNorm3d, 3 ResidualUnit)`, `no break`."""
    types: Counter[str] = Counter()
    for event in events:
        if (event.phase, event.kind) == (phase, kind):
            types[event.type] += event.count
    total = types.total()
    if not total:
        return f"no {kind}"
    ranked = sorted((-count, name) for name, count in types.items())
    if len(ranked) == 1:
        return f"{plural(total, kind)}, {'all ' if total > 1 else ''}{printable(ranked[0][1])}"
    shown = [f"{-count} {printable(name)}" for count, name in ranked[:3]]
    if len(ranked) > 3:
        shown.append(f"{total + sum(count for count, _ in ranked[:3])} more")
    return f"{plural(total, kind)} ({', '.join(shown)})"
