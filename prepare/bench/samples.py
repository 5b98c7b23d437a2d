"""What takes a turn in each round of a bench, and what may be said of it in the end."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from prepare.bench import statistics as intervals
from prepare.bench.records import Control, Row
from prepare.bench.statistics import Estimate

if TYPE_CHECKING:
    from prepare.bench.variant import Variant

_CPU = torch.device("cpu")


@dataclass(slots=True, eq=False)
class Lane:
    """A variant, or the baseline once more; `reason` says why it is out."""

    variant: Variant
    device: torch.device = _CPU
    calls: int = 1
    seconds: float = 0.0  # of a call, about
    peak: int | None = None
    samples: list[float] = field(default_factory=list)
    pages: list[float] = field(default_factory=list)  # fresh ones in a call
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Field:
    """All that take part: the variants, the baseline among them, and `again`, its second lane."""

    lanes: list[Lane]
    baseline: Lane
    again: Lane
    confidence: float

    def running(self) -> list[Lane]:
        """Those that are not out."""
        return [lane for lane in (*self.lanes, self.again) if not lane.reason]

    def out(self, variant: Variant, reason: str) -> None:
        """Takes a variant out, in both of its lanes if it is the baseline."""
        for lane in (*self.lanes, self.again):
            if lane.variant is variant:
                lane.reason = reason
                lane.samples.clear()

    def ratio(self, lane: Lane) -> Estimate:
        """Its ratio to the baseline."""
        return intervals.ratio(lane.samples, self.baseline.samples, self.confidence)

    def precision(self) -> float:
        """That of the least precise ratio; of the least precise time where the baseline is out."""
        if self.baseline.reason:
            times = (intervals.estimate(lane.samples, self.confidence) for lane in self.running())
            return intervals.widest(times)
        others = (lane for lane in self.running() if lane is not self.baseline)
        return intervals.widest(map(self.ratio, others))

    def control(self) -> Control | None:
        """The baseline against itself."""
        if self.baseline.reason:
            return None
        found = self.ratio(self.again)
        noise = intervals.noise(found)
        known = noise if math.isfinite(noise) else None
        return Control(ratio=found.value, interval=found.interval, noise=known)

    def rows(self, items: int | None) -> Iterator[Row]:
        """One for each variant, for a batch of `items`."""
        for lane in self.lanes:
            name, device = lane.variant.name, str(lane.device)
            if lane.reason:
                yield Row(name=name, verdict="failed", device=device, reason=lane.reason)
                continue
            verdict, ratio = self._verdict(lane)
            time = intervals.estimate(lane.samples, self.confidence)
            yield Row(
                name=name,
                verdict=verdict,
                seconds=time.value,
                seconds_interval=time.interval,
                ratio=ratio and ratio.value,
                ratio_interval=ratio and ratio.interval,
                throughput=items / time.value if items and time.value else None,
                peak_bytes=lane.peak,
                device=device,
                calls=lane.calls,
                samples=tuple(lane.samples),
            )

    def _verdict(self, lane: Lane) -> tuple[str, Estimate | None]:
        if self.baseline.reason:
            return "not compared", None
        if lane is self.baseline:
            return "baseline", Estimate(1.0, None)
        found = self.ratio(lane)
        return intervals.verdict(found, self.ratio(self.again)), found
