"""The sizes of a workload by name and weight, and where along them a verdict changes, in words."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import groupby, pairwise
from operator import le
from typing import TYPE_CHECKING, Any, NamedTuple

from prepare.core.utils.numbers import is_wide, verdict_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

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


class SizeVerdict(NamedTuple):
    """The verdict at a size, with the ratio of times and its interval; None if they are not known."""

    size: Size
    verdict: str
    ratio: float | None
    interval: tuple[float, float] | None = None


def is_mixed(verdicts: Sequence[SizeVerdict]) -> bool:
    """Return whether sizes have different verdicts."""
    return len({each.verdict for each in verdicts}) > 1


def verdicts_text(verdicts: Iterable[tuple[Any, ...]]) -> str:
    """Return the verdicts of sizes, each with the fields of a `SizeVerdict`, by what they say.

    >>> sizes = [Size(f"batch {count}", 1.0, count) for count in (1, 4, 8)]
    >>> verdicts = [("slower", 1.08), ("faster", 0.8), ("faster", 0.5)]
    >>> verdicts_text([(size, *each) for size, each in zip(sizes, verdicts)])
    'up to 2.0x faster from batch 4 on; 1.08x slower at batch 1'
    """
    ordered = sorted((SizeVerdict(*each) for each in verdicts), key=lambda each: each.size.elements)
    every = [each.size for each in ordered]
    groups = groupby(
        sorted(ordered, key=lambda e: _ORDER.index(e.verdict)), key=lambda e: e.verdict
    )
    parts = []
    for verdict, members in groups:
        group = list(members)
        several = len(group) > 1 and verdict in ("faster", "slower")
        text = _largest(verdict, group) if several else verdict
        if len(group) == 1 and verdict in ("faster", "slower"):
            text = verdict_text(verdict, group[0].ratio, group[0].interval)
        parts.append(f"{text} {place([each.size for each in group], every)}")
    return "; ".join(parts)


def place(sizes: Sequence[Size], every: Sequence[Size]) -> str:
    """Return where these of all sizes are, both from the smallest on: `from batch 4 on`, `at batch 1`."""
    names, count = [size.name for size in sizes], len(sizes)
    lengths = [list(map(int, re.findall(r"\d{1,18}", size.name))) for size in every]
    grows = all(all(map(le, a, b)) for a, b in pairwise(lengths))
    if grows and 1 < count < len(every):
        if list(sizes) == list(every[-count:]):
            return f"from {names[0]} on"
        if list(sizes) == list(every[:count]):
            return f"at {names[-1]} and below"
    return f"at {', '.join(names)}"


def _largest(verdict: str, group: Sequence[SizeVerdict]) -> str:
    """Return `up to 2.0x faster`; a wide interval counts with its end nearer to 1."""
    faster = verdict == "faster"
    ratios = [
        each.ratio if not each.interval or not is_wide(each.interval) else each.interval[faster]
        for each in group
        if each.ratio is not None
    ]
    largest = (min if faster else max)(ratios, default=None)
    return f"up to {verdict_text(verdict, largest)}" if largest else verdict
