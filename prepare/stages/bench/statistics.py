"""Paired rounds on a clock, and their statistics: medians, confidence intervals, verdicts."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cache
from statistics import median
from typing import NamedTuple, TypeVar

_Player = TypeVar("_Player")

# Avoids a division by zero if the clock stands still; no clock used here resolves less.
_SHORTEST = 1e-9
# Times that differ by at most this fraction count as equal.
SAME = 0.03


class Rounds:
    """The rounds of a comparison, or of a choice of rewrites; `count` are over.

    What is slow for a while slows all turns of a round, so times are compared within rounds.
    """

    def __init__(self, clock: Callable[[], float], seed: int = 0) -> None:
        self.count, self.clock, self._last = 0, clock, 0.0
        self._began, self._order = clock(), random.Random(seed)  # noqa: S311

    def turns(self, players: Sequence[_Player]) -> Iterator[_Player]:
        """Yield each player once, in random order; with the last one the round is over."""
        began = self.clock()
        yield from self._order.sample(players, len(players))
        self.count, self._last = self.count + 1, self.clock() - began

    def seconds(self) -> float:
        """Return the seconds since these rounds were made."""
        return self.clock() - self._began

    def fits(self, limit: float) -> bool:
        """Return whether a round as long as the last one ends within `limit` seconds; the first one does."""
        return not self.count or self.seconds() + self._last <= limit


class Estimate(NamedTuple):
    """A median and its confidence interval; the interval is None if there are too few values."""

    value: float
    interval: tuple[float, float] | None

    @property
    def precision(self) -> float:
        """Half the width of the interval, as a fraction of the value: 0.02 is ±2 %."""
        if self.interval is None:
            return math.inf
        low, high = self.interval
        return (high - low) / (2 * max(self.value, _SHORTEST))


def estimate(values: Collection[float], confidence: float) -> Estimate:
    """Return the median, and an interval that contains the true median with at least that confidence.

    Both ends of the interval are values of the sample, chosen by the binomial distribution: exact for
    any distribution, however skewed, as timings are. The values have to be independent.
    Source: Conover, Practical Nonparametric Statistics, 3.2; Le Boudec, Performance Evaluation of
    Computer and Communication Systems, theorem 2.1; advised for timings by Hoefler and Belli,
    Scientific Benchmarking of Parallel Computing Systems, SC 2015.

    >>> estimate(range(1, 21), 0.95)
    Estimate(value=10.5, interval=(6, 15))
    """
    rank = _rank(len(values), confidence)
    ordered = sorted(values)
    return Estimate(median(ordered), (ordered[rank], ordered[-1 - rank]) if rank >= 0 else None)


def ratio(times: Sequence[float], baseline: Sequence[float], confidence: float) -> Estimate:
    """Estimate the median of the ratios per round: what slows a whole round down cancels out.

    Source: randomised interleaved trials, Abedi and Brecht, Conducting Repeatable Experiments in
    Highly Variable Cloud Computing Environments, ICPE 2017.
    """
    return estimate(ratios(times, baseline), confidence)


def ratios(times: Sequence[float], baseline: Sequence[float]) -> list[float]:
    """Return the ratio of each pair of times in one round."""
    pairs = zip(times, baseline, strict=True)
    return [max(a, _SHORTEST) / max(b, _SHORTEST) for a, b in pairs]


def noise(control: Estimate) -> float | None:
    """Return the largest ratio that the A/A control allows, as a factor.

    It is the farther end of the control's interval: 1.03 means that a ratio between 1/1.03 and 1.03 is
    not significant. None without an interval: then no ratio is.
    """
    return max(map(_factor, control.interval)) if control.interval else None


def verdict(measured: Estimate, noise: float | None) -> str:
    """Return `faster`, `slower`, `no difference` or `unclear` for a ratio of times.

    `faster` and `slower`: the interval excludes 1, and the ratio is beyond the noise of the control.
    `no difference`: the whole interval is within 3 % of 1. `unclear`: anything else.
    """
    if measured.interval is None:
        return "unclear"
    low, high = measured.interval
    if noise and _factor(measured.value) > noise and (high < 1 or low > 1):
        return "faster" if high < 1 else "slower"
    return "no difference" if low >= 1 - SAME and high <= 1 + SAME else "unclear"


def bonferroni(confidence: float, count: int) -> float:
    """Return the confidence that each of `count` intervals needs, so that all hold with `confidence`.

    Without this correction twenty variants would have a winner by chance in most runs.
    """
    return 1 - (1 - confidence) / max(1, count)


def min_values(confidence: float) -> int:
    """Return how many values an interval needs: 6 for 0.95.

    >>> min_values(0.95)
    6
    """
    return next(count for count in range(1, 1000) if _rank(count, confidence) >= 0)


@cache
def _rank(count: int, confidence: float) -> int:
    """Return how many values are outside the interval at either end; -1 if there is no interval."""
    # P(at most k of n values are below the true median), times 2**n, for k = 0, 1, ...
    limit, below, ways, rank = (1 - confidence) / 2, 0, 1, -1
    while rank < count // 2:
        below += ways
        if below / 2**count > limit:
            break
        rank += 1
        ways = ways * (count - rank) // (rank + 1)
    return rank


def _factor(ratio: float) -> float:
    """Return the ratio or its reciprocal, whichever is larger."""
    return max(ratio, 1 / ratio)
