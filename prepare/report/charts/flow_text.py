"""What the picture of a layout flow says in words: texts cut to their room, counts, and titles."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from prepare.core.utils.text import plural, printable, size

if TYPE_CHECKING:
    from prepare.flow.records import Event, Flow
    from prepare.report.charts.module_rows import Row


def cut(text: str, room: float) -> str:
    """As much of a text as `room` letters hold, its middle left out; wide letters count twice."""
    text = printable(text[:6000])
    if wide(text) <= room:
        return text
    head, tail = "", ""
    for letter in text:
        if wide(head + letter) > room * 0.6 - 1:
            break
        head += letter
    for letter in reversed(text):
        if wide(head) + wide(tail + letter) > room - 1:
            break
        tail = letter + tail
    return f"{head}…{tail}"


def wide(text: str) -> int:
    """How many letters wide a text is; those of East Asian scripts count twice."""
    return sum(1 + (unicodedata.east_asian_width(letter) in "WF") for letter in text)


def times(count: int) -> str:
    """`never`, `once`, `17 times`."""
    return "never" if not count else "once" if count == 1 else f"{count:,} times"


def details(flow: Flow, shown: list[Row]) -> Iterable[str]:
    """The lines below the headline: where the layout is lost first, how often, what is folded up."""
    first = next((event for event in flow.events if event.kind == "break"), None)
    if first:
        where = cut(first.module, 90) or "the model itself"
        yield f"Lost first in {where} ({cut(first.type, 30)}), by {cut(_by(first), 50)}."
    found = flow.summary
    regained = f", regained {times(found['regains'])}" if found["regains"] else ""
    lost = f"lost {times(found['breaks'])}" if found["breaks"] else "never lost"
    lost = f"{_wanted(flow)} is {lost}{regained}"
    gave = f"{found['in_layout']:,} of {plural(found['convolutions'], 'convolution')} returned it"
    yield f"Forward: {lost}; {gave}."
    hidden = len(flow.modules) - sum(not row.folded for row in shown)
    if hidden:
        folded = sum(row.folded for row in shown)
        text = f"{plural(len(flow.modules), 'module')} in {plural(len(shown), 'row')}"
        yield f"{text}: {plural(folded, 'row')} in italics stand for modules that are folded up."


def layouts(row: Row) -> str:
    """`all channels_last`, or `20 channels_last, 4 contiguous`; those that were not seen only if all."""
    seen = Counter({word: count for word, count in row.sums.layouts.items() if word != "none"})
    if not seen:
        return "not seen"
    if len(seen) == 1:
        return f"all {printable(next(iter(seen)))}"
    return ", ".join(f"{count:,} {printable(word)}" for word, count in seen.most_common())


def happened(row: Row) -> str:
    """What happened in a row: each operation and how often, or counts where modules are folded up."""
    if row.folded:
        counts = ((row.sums.events[kind], kind) for kind in ("break", "regain"))
        return ", ".join(plural(count, kind) for count, kind in counts if count)
    return "; ".join(_said(*item) for item in _grouped(row.events).items())


def title(row: Row) -> str:
    """The row in words, whole, for whoever rests on it."""
    name = cut(row.module.name, 300) or "the model itself"
    if row.folded:
        more = "and the modules up to the next row"
        text = [f"{name} {more}: {plural(row.sums.modules, 'module')}, {layouts(row)}"]
    else:
        calls = "called once" if row.module.calls == 1 else f"called {row.module.calls:,} times"
        gave = (
            "gave no 4-d or 5-d tensor"
            if row.module.layout == "none"
            else cut(row.module.layout, 40)
        )
        text = [f"{name}: {cut(row.module.type, 100)}, {gave}, {calls}"]
    if said := happened(row):
        text.append(cut(said, 300))
    if row.sums.copied:
        text.append(f"{size(row.sums.copied)} copied because of layouts")
    return "; ".join(text)


def _wanted(flow: Flow) -> str:
    return " and ".join(dict.fromkeys(map(printable, flow.wanted.values()))) or "the layout"


def _grouped(events: Iterable[Event]) -> Counter[tuple[str, str, str]]:
    """How often each thing happened; what happened in forward first, and breaks before regains."""
    found: Counter[tuple[str, str, str]] = Counter()
    for event in sorted(events, key=lambda event: (event.phase != "forward", event.kind)):
        found[event.kind, event.phase, _by(event)] += event.count
    return found


def _said(key: tuple[str, str, str], count: int) -> str:
    kind, phase, by = key
    where = "" if phase == "forward" else f" in {phase}"
    return f"{'regained: ' if kind == 'regain' else ''}{by}, {times(count)}{where}"


def _by(event: Event) -> str:
    """The operation, and its cause where that says more: `aten.clone (instance_norm)`."""
    says_more = not event.operation.endswith(event.cause)
    return f"{event.operation} ({event.cause})" if says_more else event.operation
