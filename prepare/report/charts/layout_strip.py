"""A strip for a whole model: the output layouts of its modules in order, and a tick for each break."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
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
