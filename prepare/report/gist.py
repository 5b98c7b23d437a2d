"""Say in a line what two runs differ in: `layout lost 24 -> 0 times, 10.7 MiB -> 0 bytes copied`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from prepare.core.utils.text import size

if TYPE_CHECKING:
    from prepare.job.headline import BenchFigures, Headline


def gist_of(headlines: Sequence[Headline], statuses: Sequence[str]) -> str:
    """Return the most important differences of two runs and their statuses; empty if they are equal."""
    first, second = headlines
    parts = [f"status {' -> '.join(statuses)}"] if len(set(statuses)) > 1 else []
    return "; ".join([*parts, *_parts(first, second)])


def _parts(first: Headline, second: Headline) -> Iterator[str]:
    lost, lost_then = first.lost, second.lost
    if lost and lost_then and lost != lost_then and lost.status == lost_then.status == "ok":
        copied = f"{size(lost.copied_bytes)} -> {size(lost_then.copied_bytes)} copied"
        yield f"layout lost {lost.breaks:,} -> {lost_then.breaks:,} times, {copied}"
    verified, verified_then = first.verified, second.verified
    if verified and verified_then and verified.status != verified_then.status:
        yield f"verified {verified.status} -> {verified_then.status}"
    timed = {figures.what: figures for figures in first.timed}
    for figures in second.timed[:1]:
        if speed := _speed(timed.get(figures.what), figures):
            yield speed
    if first.bytes_after != second.bytes_after and first.bytes_after and second.bytes_after:
        yield f"memory {size(first.bytes_after)} -> {size(second.bytes_after)}"


def _speed(first: BenchFigures | None, second: BenchFigures) -> str:
    """Return how much faster the second is; both are timed against the unprepared model."""
    if first is None or first.ratio is None or second.ratio is None or first.where != second.where:
        return ""
    if first.interval is None or second.interval is None or first.overlaps(second):
        return "" if first == second else "speed: the difference is unclear"
    ratio = second.ratio / first.ratio
    return f"{1 / ratio:.2g}x faster" if ratio < 1 else f"{ratio:.2g}x slower"
