"""The module tree of a layout flow: for each module the layout of its output, and what loses it there."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from prepare.core.document import Node, Tree
from prepare.core.utils.text import plural, size, times
from prepare.flow.causes import event_name
from prepare.flow.strip import letter_of, style_of

if TYPE_CHECKING:
    from prepare.flow.records import Event, Flow, ModuleLayout

# More modules make a page slow to open on a phone; deeper ones stand beside their parents.
_MOST, _DEEPEST = 5000, 60


def module_tree(flow: Flow) -> Tree:
    """Return all modules as nested nodes; those with a break in them are open."""
    events: dict[str, list[Event]] = {}
    copied: Counter[str] = Counter()
    known = {module.name for module in flow.modules}
    for event in flow.events:
        events.setdefault(event.module if event.module in known else "", []).append(event)
    for copy in flow.copies:
        copied[copy.module if copy.module in known else ""] += copy.bytes
    modules = list(flow.modules[:_MOST])

    def nodes(depth: int) -> tuple[Node, ...]:
        found = []
        while modules and min(modules[-1].depth, _DEEPEST) >= depth:
            module = modules.pop()
            below = nodes(module.depth + 1) if module.depth < _DEEPEST else ()
            found.append(_node(module, events.get(module.name, ()), copied[module.name], below))
        return tuple(found)

    modules.reverse()
    title = f"Module tree: {plural(len(flow.modules), 'module')}"
    hidden = f", the first {_MOST:,}" if len(flow.modules) > _MOST else ""
    return Tree(fold=title + hidden, nodes=nodes(0))


def _node(
    module: ModuleLayout, events: list[Event] | tuple, copied: int, below: tuple[Node, ...]
) -> Node:
    """Return the node of a module; it is open if the layout is lost in a module below it."""
    counts: Counter[tuple[str, str, str]] = Counter()
    for event in sorted(events, key=lambda event: (event.phase != "forward", event.kind)):
        counts[event.kind, event.phase, event_name(event)] += event.count
    kinds = {event.kind for event in events}
    return Node(
        name=module.name or "the model itself",
        about=module.type,
        style=style_of(module.layout),
        letter=letter_of(module.layout),
        remark="; ".join(_event_text(*item) for item in counts.items()),
        mark="break" if "break" in kinds else "regain" if kinds else "",
        figure=f"{size(copied)} copied" if copied else "",
        children=below,
        is_open=any(child.mark == "break" or child.is_open for child in below),
    )


def _event_text(key: tuple[str, str, str], count: int) -> str:
    kind, phase, by = key
    suffix = "" if phase == "forward" else f" in {phase}"
    return f"{'regained: ' if kind == 'regain' else ''}{by}, {times(count)}{suffix}"
