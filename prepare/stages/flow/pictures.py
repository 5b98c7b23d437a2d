"""The pictures of a layout flow: a strip of the layouts of all modules, and their tree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import groupby
from math import ceil
from statistics import mode
from typing import TYPE_CHECKING, NamedTuple

from prepare.core.document import Node, Tree
from prepare.core.model.memory_format import satisfied
from prepare.core.utils.text import plural, size, times
from prepare.stages.flow.causes import event_name

if TYPE_CHECKING:
    from prepare.stages.flow.records import Event, Flow, ModuleLayout

# More modules make a page slow to open on a phone; deeper ones stand beside their parents.
_MOST, _DEEPEST = 5000, 60
# The pixels of a strip. Parts that are narrower cannot be told apart.
_WIDTH, _MIN_PIXELS = 1000, 2


class LayoutStrip(NamedTuple):
    """`parts` are (style, start, width) in pixels; `ticks` are the pixels of breaks, without duplicates."""

    parts: tuple[tuple[str, float, float], ...] = ()
    ticks: tuple[int, ...] = ()


def layout_strip(flow: Flow) -> LayoutStrip:
    """Place the leaf modules that returned a tensor side by side.

    A module whose own code loses the layout stands before the modules in it, with the layout that it makes.
    """
    styles: list[str] = []
    leaf_index: dict[str, int] = {}
    lost = {event.module: event for event in flow.events if event.kind == "break"}
    depths = [module.depth for module in flow.modules]
    for module, next_depth in zip(flow.modules, [*depths[1:], 0], strict=False):
        leaf_index[module.name] = len(styles)
        if next_depth > module.depth and module.name in lost:
            styles.append(style_of(_left(lost[module.name])))
        elif next_depth <= module.depth and module.layout != "none":
            styles.append(style_of(module.layout))
    if not styles:
        return LayoutStrip()
    unit = _WIDTH / len(styles)
    breaks = {leaf_index.get(name, 0) for name in lost}
    ticks = sorted({min(round((at + 0.5) * unit), _WIDTH) for at in breaks})
    step = ceil(_MIN_PIXELS / unit)
    bins = [mode(styles[at : at + step]) for at in range(0, len(styles), step)]
    parts, at = [], 0
    for name, group in groupby(bins):
        until = min(at + step * len(list(group)), len(styles))
        parts.append((name, round(at * unit, 1), round((until - at) * unit, 1)))
        at = until
    return LayoutStrip(tuple(parts), tuple(ticks))


def _left(event: Event) -> str:
    """Return the layout of the tensor that a break leaves."""
    formats: tuple[str, ...] = ()
    if len(event.shape) == len(event.after):  # a file may hold anything
        formats = satisfied(event.shape, event.after)
    return formats[0] if formats else "other"


# A letter besides the colour, as not everyone can distinguish the colours.
_LETTERS = {
    "channels_last": "L",
    "channels_last_3d": "L3",
    "contiguous": "C",
    "ambiguous": "A",
    "other": "O",
    "none": "",
}
_STYLES = {"channels_last": "flat", "channels_last_3d": "last"}
_MEANINGS = {
    "ambiguous": "ambiguous: satisfies several layouts",
    "other": "other: no known layout",
    "none": "not seen: not called, or returned no 4-d or 5-d tensor",
}


def style_of(layout: str) -> str:
    """Return the style of a layout, as in `fp-last`."""
    return _STYLES.get(layout, layout if layout in _LETTERS else "odd")


def letter_of(layout: str) -> str:
    """Return the letter of a layout: `L`, `C`; `?` for an unknown one."""
    return _LETTERS.get(layout, "?")


def styles_of(flows: Iterable[Flow]) -> list[tuple[str, str, str]]:
    """Return (style, letter, meaning) of each layout in the strips of these flows, and of a tick."""
    flows = list(flows)
    seen = {module.layout for flow in flows for module in flow.modules}
    known = [layout for layout in _LETTERS if layout in seen]
    entries = [(style_of(name), _LETTERS[name], _MEANINGS.get(name, name)) for name in known]
    if not seen <= _LETTERS.keys():
        entries.append(("odd", "?", "unknown layout"))
    if any(event.kind == "break" for flow in flows for event in flow.events):
        entries.append(("tick", "", "lost here"))
    return list(dict.fromkeys(entries))


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
        made = []
        while modules and min(modules[-1].depth, _DEEPEST) >= depth:
            module = modules.pop()
            below = nodes(module.depth + 1) if module.depth < _DEEPEST else ()
            made.append(_node(module, events.get(module.name, ()), copied[module.name], below))
        return tuple(made)

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
