"""The weighted whole of the comparisons of several sizes: as if all of their calls were one call."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from prepare.core.utils.machine import disturbance
from prepare.core.utils.numbers import finite
from prepare.stages.bench import statistics
from prepare.stages.bench.records import Comparison, Control, VariantResult
from prepare.stages.bench.statistics import Estimate


def combine_sizes(sizes: Sequence[Comparison]) -> Comparison:
    """Return the comparison of all calls together, each size as often as its weight says."""
    counted = [each for each in sizes if _weight(each)]
    first = next((each for each in counted if disturbance(each.settings)), counted[0])
    control = _control(counted)
    names = [row.name for row in first.rows if all(_has(each, row.name) for each in counted)]
    return replace(
        first,
        rows=tuple(_row(counted, name, control) for name in names),
        aa=control,
        repeats=min(each.repeats for each in counted),
        seconds=sum(each.seconds for each in sizes),
        settings={**first.settings, "batch_size": None},
        notes=tuple(dict.fromkeys(_note(each, note) for each in sizes for note in each.notes)),
        size=None,
        sizes=tuple(sizes),
    )


def combined(estimates: Sequence[Estimate], amounts: Sequence[float]) -> Estimate:
    """Return the ratio of all calls together, from those of the sizes and the baseline's time in each.

    The interval adds up those of the sizes: if these are independent it is wider than needed.
    """
    parts = [amount / sum(amounts) for amount in amounts]

    def total(values: Sequence[float]) -> float:
        return sum(part * value for part, value in zip(parts, values, strict=True))

    known = [each.interval for each in estimates if each.interval]
    interval = None
    if len(known) == len(estimates):
        interval = (total([low for low, _ in known]), total([high for _, high in known]))
    return Estimate(total([each.value for each in estimates]), interval)


def _row(counted: Sequence[Comparison], name: str, control: Control | None) -> VariantResult:
    rows = [each.row(name) for each in counted]
    lost = [row.seconds is None or row.ratio is None for row in rows]
    missing = rows[lost.index(True)] if any(lost) else None
    reasons = [
        _note(each, row.reason)
        for each, row in zip(counted, rows, strict=True)
        if row.reason and (missing is None or row is missing)
    ]
    peaks = [row.peak_bytes for row in rows if row.peak_bytes is not None]
    result = VariantResult(
        name=name,
        verdict=missing.verdict if missing else rows[0].verdict,
        device=rows[0].device,
        peak_bytes=max(peaks, default=None),
        reason=next(iter(reasons), ""),
    )
    if missing:
        return result
    times = [Estimate(row.seconds or 0.0, row.seconds_interval) for row in rows]
    spent = combined(times, [_weight(each) for each in counted])
    result = replace(result, seconds=spent.value, seconds_interval=spent.interval)
    if result.verdict == "baseline":
        return replace(result, ratio=1.0)
    ratios = [Estimate(row.ratio or 0.0, row.ratio_interval) for row in rows]
    ratio = combined(ratios, _amounts(counted))
    verdict = statistics.verdict(ratio, control.noise if control and control.noise else math.inf)
    few = result.reason or "the intervals of the sizes together are too wide"
    return replace(
        result,
        verdict=verdict,
        ratio=ratio.value,
        ratio_interval=ratio.interval,
        reason=few if verdict == "unclear" else "",
    )


def _control(counted: Sequence[Comparison]) -> Control | None:
    controls = [each.aa for each in counted if each.aa]
    if len(controls) < len(counted):
        return None
    found = combined([Estimate(c.ratio, c.interval) for c in controls], _amounts(counted))
    noise = finite(statistics.noise(found))
    return Control(ratio=found.value, interval=found.interval, noise=noise)


def _weight(comparison: Comparison) -> float:
    return comparison.size.weight if comparison.size else 0.0


def _amounts(counted: Sequence[Comparison]) -> list[float]:
    """Return the time of the baseline in each size."""
    return [_weight(each) * (each.row(each.baseline).seconds or 0.0) for each in counted]


def _has(comparison: Comparison, name: str) -> bool:
    return any(row.name == name for row in comparison.rows)


def _note(comparison: Comparison, note: str) -> str:
    return f"at {comparison.size.name}: {note}" if comparison.size else note
