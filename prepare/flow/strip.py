"""A strip for a whole model: the output layouts of its modules in order, and a tick for each break."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import groupby
from math import ceil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prepare.flow.records import Flow

# Narrower parts are not distinguishable.
_MIN_PIXELS = 2


@dataclass(frozen=True, slots=True)
class LayoutStrip:
    """`parts` are (style, start, width) in pixels; `ticks` are the pixels of breaks, without duplicates."""

    parts: list[tuple[str, float, float]]
    ticks: list[int]


def layout_strip(flow: Flow, *, width: int, style: Callable[[str], str]) -> LayoutStrip:
    """Place the leaf modules that returned a tensor side by side over `width` pixels."""
    if not flow.modules:
        return LayoutStrip([], [])
    styles: list[str] = []
    leaf_index: dict[str, int] = {}
    depths = [module.depth for module in flow.modules]
    for module, next_depth in zip(flow.modules, [*depths[1:], 0], strict=True):
        leaf_index[module.name] = len(styles)
        if next_depth <= module.depth and module.layout != "none":
            styles.append(style(module.layout))
    if not styles:
        return LayoutStrip([], [])
    unit = width / len(styles)
    breaks = {leaf_index.get(event.module, 0) for event in flow.events if event.kind == "break"}
    ticks = sorted({min(round((at + 0.5) * unit), width) for at in breaks})
    step = ceil(_MIN_PIXELS / unit)
    bins = [_most_common(styles[at : at + step]) for at in range(0, len(styles), step)]
    parts, at = [], 0
    for name, group in groupby(bins):
        until = min(at + step * len(list(group)), len(styles))
        parts.append((name, round(at * unit, 1), round((until - at) * unit, 1)))
        at = until
    return LayoutStrip(parts, ticks)


def _most_common(styles: list[str]) -> str:
    return Counter(styles).most_common(1)[0][0]


# A letter besides the colour, as not everyone can distinguish the colours.
_LETTERS = {
    "channels_last": "L",
    "channels_last_3d": "L",
    "contiguous": "C",
    "ambiguous": "A",
    "other": "O",
    "none": "",
}
_MEANINGS = {
    "ambiguous": "ambiguous: satisfies several layouts",
    "other": "other: no known layout",
    "none": "not seen: not called, or returned no 4-d or 5-d tensor",
}


def style_of(layout: str) -> str:
    """Return the style of a layout; both channels-last formats share one, as no tensor has both."""
    if layout in ("channels_last", "channels_last_3d"):
        return "last"
    return layout if layout in _LETTERS else "odd"


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
