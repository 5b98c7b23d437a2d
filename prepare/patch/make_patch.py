"""Make the patch of a prepared model: the calls to change, what each saves, and the breaks that stay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from prepare.flow.call_sites import short_path
from prepare.patch.records import Patch, PatchedCall, UnpatchedBreak
from prepare.patch.write_diff import write_diff
from prepare.steps.keeping.choose_calls import ChosenCalls, calls_of_place, cost_of

if TYPE_CHECKING:
    from torch import nn

    from prepare.flow.records import Event


def make_patch(model: nn.Module, chosen: ChosenCalls) -> Patch:
    """Return the patch that replaces the chosen calls in the source of the model, not timed or verified."""
    return Patch(
        diff=write_diff(chosen.calls),
        calls=tuple(
            PatchedCall(
                name=call.name,
                source=f"{short_path(call.file)}:{call.lines[0]}",
                copied_bytes=copied,
                breaks=breaks,
            )
            for call, (copied, breaks) in zip(chosen.calls, chosen.saved, strict=True)
        ),
        left=tuple(_left(model, chosen)),
        before=cost_of(chosen.before),
        after=cost_of(chosen.after),
    )


def _left(model: nn.Module, chosen: ChosenCalls) -> Iterator[UnpatchedBreak]:
    """Yield the breaks that stay, added up for each place, the most frequent first."""
    counts: Counter[tuple[str, str, str]] = Counter()
    for event in chosen.after.events:
        if event.kind == "break":
            source = event.source or f"{event.type} ({event.module})"
            counts[source, event.cause, _reason(model, chosen, event)] += event.count
    for (source, cause, reason), count in counts.most_common():
        yield UnpatchedBreak(source=source, cause=cause, breaks=count, reason=reason)


def _reason(model: nn.Module, chosen: ChosenCalls, event: Event) -> str:
    if not event.source:
        return "it is inside a module of torch; repair_layout repairs those that it knows"
    calls = list(calls_of_place(model, event))
    for call in calls:
        if call.obstacle:
            return call.obstacle
    if calls and event.phase == "backward":
        return "the gradient loses it, which the call cannot prevent"
    if calls:
        return "it is changed" if calls[0].name in chosen.names else "a change removes no break"
    return f"no replacement is known for {event.operation} there"
