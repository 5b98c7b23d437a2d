"""A whole model in one strip: the layouts that its modules gave, in order, and a tick for each break."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from math import ceil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prepare.flow.records import Flow

# Parts narrower than two pixels cannot be told apart.
_NARROWEST = 2


@dataclass(frozen=True, slots=True)
class Ribbon:
    """`parts` are (style, from, width) in pixels; `ticks` are the places of breaks, each once."""

    parts: list[tuple[str, float, float]]
    ticks: list[int]


def ribbon(flow: Flow, *, width: int, style: Callable[[str], str]) -> Ribbon:
    """The modules that hold no others and gave a tensor, side by side over `width` pixels."""
    styles, place = [], {}
    depths = [module.depth for module in flow.modules]
    for module, below in zip(flow.modules, [*depths[1:], 0], strict=True):
        place[module.name] = len(styles)
        if below <= module.depth and module.layout != "none":
            styles.append(style(module.layout))
    if not styles:
        return Ribbon([], [])
    unit = width / len(styles)
    lost = {place.get(event.module, 0) for event in flow.events if event.kind == "break"}
    ticks = sorted({min(round((at + 0.5) * unit), width) for at in lost})
    step = ceil(_NARROWEST / unit)
    bins = [_most(styles[at : at + step]) for at in range(0, len(styles), step)]
    parts, at = [], 0
    for name, run in groupby(bins):
        until = min(at + step * len(list(run)), len(styles))
        parts.append((name, round(at * unit, 1), round((until - at) * unit, 1)))
        at = until
    return Ribbon(parts, ticks)


def _most(styles: list[str]) -> str:
    return Counter(styles).most_common(1)[0][0]
