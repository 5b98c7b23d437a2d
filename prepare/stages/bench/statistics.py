"""The statistics of a bench: medians, their confidence intervals, and verdicts."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from functools import cache
from itertools import pairwise
from statistics import NormalDist, median
from typing import NamedTuple

# Avoids a division by zero if the clock stands still; no clock used here resolves less.
_SHORTEST = 1e-9
# Times that differ by at most this fraction count as equal.
_SAME = 0.03
# The standard deviation of normal values over the median of their absolute values.
_NORMAL = 1.4826


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


class Scatter(NamedTuple):
    """The spread of ratios: the standard deviation of their logarithms, from `steps` differences."""

    deviation: float
    steps: int


def scatter(series: Iterable[Sequence[float]]) -> Scatter | None:
    """Estimate the common spread of several series of ratios, each in the order of the rounds.

    It rests on the differences of successive values of a series, so the series may have different
    medians and a drifting machine adds little, and on the median of these differences, which outliers
    hardly move. None if there is no difference.
    """
    steps = [abs(math.log(b / a)) for values in series for a, b in pairwise(values)]
    return Scatter(_NORMAL * median(steps) / math.sqrt(2), len(steps)) if steps else None


def estimate_of_few(values: Sequence[float], confidence: float, known: Scatter) -> Estimate:
    """Return the median of too few ratios for an exact interval, with an interval based on a spread.

    It assumes normally distributed logarithms with the spread of all ratios, `known`, or with the spread
    of `values` if that is larger. The interval is widened by Student's t (Fisher's expansion) for the
    number of differences: a median of absolute values is 0.37 times as informative as a standard
    deviation of as many normal values.
    """
    own = scatter([values])
    deviation = max(known.deviation, own.deviation if own else 0.0)
    normal, freedom = NormalDist().inv_cdf((1 + confidence) / 2), 0.37 * known.steps
    student = normal + (normal**3 + normal) / (4 * freedom)
    reach = math.exp(student * math.sqrt(math.pi / 2) * deviation / math.sqrt(len(values)))
    middle = median(values)
    return Estimate(middle, (middle / reach, middle * reach))


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
    return "no difference" if low >= 1 - _SAME and high <= 1 + _SAME else "unclear"


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
