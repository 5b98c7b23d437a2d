"""The sizes of a workload by name and weight, and where along them a verdict changes, in words."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from operator import le
from typing import Any

from prepare.core.utils.numbers import verdict_text

_ORDER = ("faster", "slower", "no difference", "unclear", "failed", "not compared")


@dataclass(frozen=True, slots=True)
class Size:
    """One size of a workload.

    `name` tells it from the others: `batch 4`, `64x64x64`, or the whole shape. `weight` is the number of its
    calls for those of the others; one of 0 is looked at and does not count. `elements` are those of its
    first tensor.
    """

    name: str
    weight: float
    elements: int

    @property
    def key(self) -> str:
        """The name as a part of the key of a figure."""
        return f"at_{self.name.replace(' ', '_')}"


def without_empty_sizes(items: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return a mapping for `asdict`: a record of one size has no keys for several."""
    return {key: value for key, value in items if value or key not in ("size", "sizes", "better")}


def is_mixed(found: Sequence[tuple[Size, str, float | None]]) -> bool:
    """Return whether sizes have different verdicts."""
    return len({verdict for _, verdict, _ in found}) > 1


def verdicts_text(found: Sequence[tuple[Size, str, float | None]]) -> str:
    """Return the verdicts of sizes, each (size, verdict, ratio of times), by what they say.

    >>> sizes = [Size(f"batch {count}", 1.0, count) for count in (1, 4, 8)]
    >>> verdicts = [("slower", 1.08), ("faster", 0.8), ("faster", 0.5)]
    >>> verdicts_text([(size, *each) for size, each in zip(sizes, verdicts)])
    'up to 2.0x faster from batch 4 on; 1.08x slower at batch 1'
    """
    ordered = sorted(found, key=lambda each: each[0].elements)
    every = [size for size, _, _ in ordered]
    groups = groupby(sorted(ordered, key=lambda e: _ORDER.index(e[1])), key=lambda e: e[1])
    parts = []
    for verdict, members in groups:
        group = list(members)
        ratios = [ratio for _, _, ratio in group if ratio is not None]
        text = _figure(verdict, ratios)
        several = len(group) > 1 and verdict in ("faster", "slower")
        parts.append(f"{'up to ' * several}{text} {place([e[0] for e in group], every)}")
    return "; ".join(parts)


def place(sizes: Sequence[Size], every: Sequence[Size]) -> str:
    """Return where these of all sizes are, both from the smallest on: `from batch 4 on`, `at batch 1`."""
    names, count = [size.name for size in sizes], len(sizes)
    lengths = [list(map(int, re.findall(r"\d+", size.name))) for size in every]
    grows = all(all(map(le, a, b)) for a, b in pairwise(lengths))
    if grows and 1 < count < len(every):
        if list(sizes) == list(every[-count:]):
            return f"from {names[0]} on"
        if list(sizes) == list(every[:count]):
            return f"at {names[-1]} and below"
    return f"at {', '.join(names)}"


def _figure(verdict: str, ratios: Sequence[float]) -> str:
    if not ratios or verdict not in ("faster", "slower"):
        return verdict
    return verdict_text(verdict, min(ratios) if verdict == "faster" else max(ratios))
