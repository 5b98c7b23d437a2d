"""Texts of the layout flow picture: shortened names, counts and titles."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from prepare.core.utils.text import plural, printable, size
from prepare.flow.causes import event_name

if TYPE_CHECKING:
    from prepare.flow.records import Event, Flow
    from prepare.report.charts.module_rows import ModuleRow


def cut(text: str, room: float) -> str:
    """Shorten a text to a width of `room` letters; leave its middle out. Wide letters count twice."""
    text = printable(text[:6000])
    if width_of(text) <= room:
        return text
    head, tail = "", ""
    for letter in text:
        if width_of(head + letter) > room * 0.6 - 1:
            break
        head += letter
    for letter in reversed(text):
        if width_of(head) + width_of(tail + letter) > room - 1:
            break
        tail = letter + tail
    return f"{head}…{tail}"


def width_of(text: str) -> int:
    """Return the width of a text in letters; those of East Asian scripts count twice."""
    return sum(1 + (unicodedata.east_asian_width(letter) in "WF") for letter in text)


def times(count: int) -> str:
    """Return `never`, `once` or `17 times`."""
    return "never" if not count else "once" if count == 1 else f"{count:,} times"


def details(flow: Flow, shown: list[ModuleRow]) -> Iterable[str]:
    """Yield the lines below the headline: the first break, the number of breaks, the folded rows."""
    first = next((event for event in flow.events if event.kind == "break"), None)
    if first:
        module = cut(first.module, 90) or "the model itself"
        yield f"Lost first in {module}: {cut(event_name(first), 60)}."
    summary = flow.summary
    regained = f", regained {times(summary['regains'])}" if summary["regains"] else ""
    lost = f"lost {times(summary['breaks'])}" if summary["breaks"] else "never lost"
    events = f"{_wanted(flow)} is {lost}{regained}"
    outputs = (
        f"{summary['in_layout']:,} of {plural(summary['convolutions'], 'convolution')} returned it"
    )
    yield f"Forward: {events}; {outputs}."
    hidden = len(flow.modules) - sum(not row.folded for row in shown)
    if hidden:
        folded = sum(row.folded for row in shown)
        text = f"{plural(len(flow.modules), 'module')} in {plural(len(shown), 'row')}"
        yield f"{text}: {plural(folded, 'row')} in italics stand for folded modules."


def layouts(row: ModuleRow) -> str:
    """Return `all channels_last`, or `20 channels_last, 4 contiguous`, or `not seen`."""
    seen = Counter({word: count for word, count in row.totals.layouts.items() if word != "none"})
    if not seen:
        return "not seen"
    if len(seen) == 1:
        return f"all {printable(next(iter(seen)))}"
    return ", ".join(f"{count:,} {printable(word)}" for word, count in seen.most_common())


def events_text(row: ModuleRow) -> str:
    """Return the operators of a row and their counts; for folded modules the counts of breaks and regains."""
    if row.folded:
        counts = ((row.totals.events[kind], kind) for kind in ("break", "regain"))
        return ", ".join(plural(count, kind) for count, kind in counts if count)
    return "; ".join(_event_text(*item) for item in _grouped(row.events).items())


def title(row: ModuleRow) -> str:
    """Return the full text of a row, which browsers show as a tooltip."""
    name = cut(row.module.name, 300) or "the model itself"
    if row.folded:
        more = "and the modules up to the next row"
        text = [f"{name} {more}: {plural(row.totals.modules, 'module')}, {layouts(row)}"]
    else:
        calls = "called once" if row.module.calls == 1 else f"called {row.module.calls:,} times"
        output = (
            "returned no 4-d or 5-d tensor"
            if row.module.layout == "none"
            else cut(row.module.layout, 40)
        )
        text = [f"{name}: {cut(row.module.type, 100)}, {output}, {calls}"]
    if events := events_text(row):
        text.append(cut(events, 300))
    if row.totals.copied:
        text.append(f"{size(row.totals.copied)} copied because of layouts")
    return "; ".join(text)


def _wanted(flow: Flow) -> str:
    return " and ".join(dict.fromkeys(map(printable, flow.wanted.values()))) or "the layout"


def _grouped(events: Iterable[Event]) -> Counter[tuple[str, str, str]]:
    """Count equal events; forward before backward, breaks before regains."""
    counts: Counter[tuple[str, str, str]] = Counter()
    for event in sorted(events, key=lambda event: (event.phase != "forward", event.kind)):
        counts[event.kind, event.phase, event_name(event)] += event.count
    return counts


def _event_text(key: tuple[str, str, str], count: int) -> str:
    kind, phase, by = key
    suffix = "" if phase == "forward" else f" in {phase}"
    return f"{'regained: ' if kind == 'regain' else ''}{by}, {times(count)}{suffix}"
