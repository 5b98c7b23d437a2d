"""Name what loses the layout by module class and operator, and add up what it costs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from prepare.core.utils.text import plural, printable

if TYPE_CHECKING:
    from collections.abc import Iterable

    from prepare.stages.flow.records import Event, Flow

# A sentence names at most so many causes.
_NAMED = 3


@dataclass(slots=True)
class LayoutCause:
    """A class of modules and the operator in it that loses the layout, over one forward.

    `count` is the number of breaks, `first` the first module. `copied` are the bytes that are copied at
    the breaks, `regained` those that the convolutions after them copy to bring the layout back.
    """

    name: str
    count: int = 0
    copied: int = 0
    regained: int = 0
    first: str = ""


def source_name(kind: str, operator: str) -> str:
    """Return the name of a cause: `InstanceNorm2d`, or `cat in UNetDecoder` if the class does not say it."""
    said = operator.replace("_", "").replace("convolution", "conv").lower() in kind.lower()
    return printable(kind if said or not operator else f"{operator} in {kind}")


def layout_causes(flow: Flow, phase: str = "forward") -> list[LayoutCause]:
    """Return the causes of breaks, the most frequent first.

    A copy at a convolution that regains the layout counts for the last break before it; a copy that
    belongs to no break has a cause with a `count` of 0.
    """
    causes: dict[str, LayoutCause] = {}
    broken_at: dict[tuple[str, str], str] = {}
    regained_at: dict[str, str] = {}
    last = ""
    for event in flow.events:
        if event.phase != phase:
            continue
        name = source_name(event.type, event.cause)
        if event.kind == "break":
            last = name
            cause = causes.setdefault(name, LayoutCause(name, first=event.module))
            cause.count += event.count
            broken_at[event.module, event.operation] = name
        elif last:
            regained_at.setdefault(event.module, last)
    for copy in flow.copies:
        if copy.phase != phase:
            continue
        at_break = broken_at.get((copy.module, copy.operation))
        at_regain = regained_at.get(copy.module)
        if at_break:
            causes[at_break].copied += copy.bytes
        elif at_regain:
            causes[at_regain].regained += copy.bytes
        else:
            name = source_name(copy.type, copy.operation.rpartition(".")[2])
            causes.setdefault(name, LayoutCause(name, first=copy.module)).copied += copy.bytes
    return sorted(causes.values(), key=lambda cause: (-cause.count, cause.name))


def breaks_text(causes: Iterable[LayoutCause]) -> str:
    """Return `13 breaks, all InstanceNorm3d`, or `16 breaks (13 InstanceNorm3d, 3 cat in UNet3d)`."""
    causes = [cause for cause in causes if cause.count]
    total = sum(cause.count for cause in causes)
    if not total:
        return "no breaks"
    if len(causes) == 1:
        return f"{plural(total, 'break')}, {'all ' if total > 1 else ''}{causes[0].name}"
    return f"{plural(total, 'break')} ({named(causes)})"


def named(causes: Iterable[LayoutCause]) -> str:
    """Return `13 InstanceNorm3d, 3 cat in UNet3d`, at most three and the number of the others."""
    causes = [cause for cause in causes if cause.count]
    texts = [f"{cause.count:,} {cause.name}" for cause in causes[:_NAMED]]
    if len(causes) > _NAMED:
        texts.append(f"{sum(cause.count for cause in causes[_NAMED:]):,} more")
    return ", ".join(texts)


def event_name(event: Event) -> str:
    """Return the name of the cause of an event."""
    return source_name(event.type, event.cause)
