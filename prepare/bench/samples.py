"""The timings of each variant of a bench, and the rows that follow from them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from prepare.bench import statistics
from prepare.bench.records import Control, VariantResult
from prepare.bench.statistics import Estimate

if TYPE_CHECKING:
    from prepare.bench.variant import Variant

_CPU = torch.device("cpu")


@dataclass(slots=True, eq=False)
class Series:
    """The timings of a variant, one per round; `reason` says why the variant failed."""

    variant: Variant
    device: torch.device = _CPU
    calls: int = 1
    call_seconds: float = 0.0  # of one call, about
    peak: int | None = None
    samples: list[float] = field(default_factory=list)
    page_faults: list[float] = field(default_factory=list)  # per call
    reason: str = ""


@dataclass(frozen=True, slots=True)
class SampleSet:
    """One series per variant, and `control`, the second series of the baseline (A/A)."""

    series: list[Series]
    baseline: Series
    control: Series
    confidence: float

    def active(self) -> list[Series]:
        """Return the series that have not failed, the control included."""
        return [series for series in (*self.series, self.control) if not series.reason]

    def drop(self, variant: Variant, reason: str) -> None:
        """Mark a variant as failed; for the baseline, both of its series."""
        for series in (*self.series, self.control):
            if series.variant is variant:
                series.reason = reason
                series.samples.clear()

    def ratio(self, series: Series) -> Estimate:
        """Estimate the ratio of a variant's time to the baseline's."""
        return statistics.ratio(series.samples, self.baseline.samples, self.confidence)

    def precision(self) -> float:
        """Return the precision of the least precise ratio, or time if the baseline failed."""
        if self.baseline.reason:
            times = (statistics.estimate(each.samples, self.confidence) for each in self.active())
            return statistics.worst_precision(times)
        others = (series for series in self.active() if series is not self.baseline)
        return statistics.worst_precision(map(self.ratio, others))

    def is_settled(self) -> bool:
        """Return whether no verdict is `unclear`, so that more rounds need not be timed."""
        return all(self._verdict(each)[0] != "unclear" for each in self.series if not each.reason)

    def control_result(self) -> Control | None:
        """Compare the baseline with itself; None if it failed."""
        if self.baseline.reason:
            return None
        ratio = self.ratio(self.control)
        noise = statistics.noise(ratio)
        finite = noise if math.isfinite(noise) else None
        return Control(ratio=ratio.value, interval=ratio.interval, noise=finite)

    def rows(self, items: int | None, unclear: str) -> Iterator[VariantResult]:
        """Yield a row per variant; `items` is the batch size, `unclear` the reason of such verdicts."""
        for series in self.series:
            name, device = series.variant.name, str(series.device)
            if series.reason:
                yield VariantResult(
                    name=name, verdict="failed", device=device, reason=series.reason
                )
                continue
            verdict, ratio = self._verdict(series)
            time = statistics.estimate(series.samples, self.confidence)
            yield VariantResult(
                name=name,
                verdict=verdict,
                seconds=time.value,
                seconds_interval=time.interval,
                ratio=ratio and ratio.value,
                ratio_interval=ratio and ratio.interval,
                throughput=items / time.value if items and time.value else None,
                peak_bytes=series.peak,
                device=device,
                calls=series.calls,
                samples=tuple(series.samples),
                reason=unclear if verdict == "unclear" else "",
            )

    def _verdict(self, series: Series) -> tuple[str, Estimate | None]:
        if self.baseline.reason:
            return "not compared", None
        if series is self.baseline:
            return "baseline", Estimate(1.0, None)
        ratio = self.ratio(series)
        return statistics.verdict(ratio, statistics.noise(self.ratio(self.control))), ratio
