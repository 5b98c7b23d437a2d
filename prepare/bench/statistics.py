"""The statistics of a bench, apart from any timing: medians, their intervals, and verdicts."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from functools import cache
from itertools import pairwise
from statistics import NormalDist, median
from typing import NamedTuple

# A clock that stands still must not divide by zero; no clock here tells less than this apart.
_SHORTEST = 1e-9
# The standard deviation of normal values, over the median of their absolute ones.
_NORMAL = 1.4826


class Estimate(NamedTuple):
    """A median and its confidence interval, which is None where the values are too few for one."""

    value: float
    interval: tuple[float, float] | None

    @property
    def precision(self) -> float:
        """Half the width of the interval, as a part of the value: 0.02 is ±2 %."""
        if self.interval is None:
            return math.inf
        low, high = self.interval
        return (high - low) / (2 * max(self.value, _SHORTEST))


def estimate(values: Collection[float], confidence: float) -> Estimate:
    """The median, and the interval that holds the true one with at least that confidence.

    Between two of the values themselves, chosen by the binomial distribution: exact for any
    distribution, however skewed, as timings are. It does ask for values that are independent.
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
    """How far ratios of equals lie apart: the standard deviation of their logarithms, from `count` pairs."""

    deviation: float
    count: int


def scatter(series: Iterable[Sequence[float]]) -> Scatter | None:
    """What the ratios of several pairs of variants, each in the order of the rounds, say of it together.

    From each value to the next of the same series: so the series may have different medians, and a
    machine that drifts adds little. By the median of these steps, which outliers hardly move. None
    where there is no step.
    """
    steps = [abs(math.log(b / a)) for values in series for a, b in pairwise(values)]
    return Scatter(_NORMAL * median(steps) / math.sqrt(2), len(steps)) if steps else None


def estimate_of_few(values: Sequence[float], confidence: float, known: Scatter) -> Estimate:
    """The median of ratios that are too few for an exact interval, and one that rests on what is `known`.

    As if the logarithms scattered normally, as much as is known of all or, where that is more, as these
    do themselves; wider by Student's t, in Fisher's expansion, the less there is known: a median of
    absolute values tells 0.37 times as much as a deviation from as many normal ones.
    """
    own = scatter([values])
    deviation = max(known.deviation, own.deviation if own else 0.0)
    normal, freedom = NormalDist().inv_cdf((1 + confidence) / 2), 0.37 * known.count
    student = normal + (normal**3 + normal) / (4 * freedom)
    reach = math.exp(student * math.sqrt(math.pi / 2) * deviation / math.sqrt(len(values)))
    middle = median(values)
    return Estimate(middle, (middle / reach, middle * reach))


def ratio(times: Sequence[float], baseline: Sequence[float], confidence: float) -> Estimate:
    """The median of the ratios of one round each: what slows a whole round down cancels out.

    Source: randomised interleaved trials, Abedi and Brecht, Conducting Repeatable Experiments in
    Highly Variable Cloud Computing Environments, ICPE 2017.
    """
    pairs = zip(times, baseline, strict=True)
    return estimate([max(a, _SHORTEST) / max(b, _SHORTEST) for a, b in pairs], confidence)


def noise(control: Estimate) -> float:
    """How far the baseline may lie from itself: the farther end of its own interval, as a factor.

    1.03 says that a ratio between 1/1.03 and 1.03 tells nothing. Infinite without an interval.
    """
    if control.interval is None:
        return math.inf
    return max(_distance(end) for end in control.interval)


def verdict(found: Estimate, control: Estimate) -> str:
    """`faster` or `slower` where the interval leaves out 1 and the ratio lies beyond the noise."""
    if found.interval is None or _distance(found.value) <= noise(control):
        return "no significant difference"
    low, high = found.interval
    if high < 1:
        return "faster"
    return "slower" if low > 1 else "no significant difference"


def widest(estimates: Iterable[Estimate]) -> float:
    """The precision of the least precise of them; infinite where there are none."""
    return max((each.precision for each in estimates), default=math.inf)


def each_of(confidence: float, count: int) -> float:
    """The confidence that each of `count` intervals needs, so that all of them hold with the one given.

    Bonferroni's: twenty variants would otherwise have a winner by chance in most runs.
    """
    return 1 - (1 - confidence) / max(1, count)


def fewest(confidence: float) -> int:
    """How many values an interval takes: 6 for 0.95.

    >>> fewest(0.95)
    6
    """
    return next(count for count in range(1, 1000) if _rank(count, confidence) >= 0)


@cache
def _rank(count: int, confidence: float) -> int:
    """How many values lie outside the interval at either end; below 0 where there is no interval."""
    # P(no more than k of n values lie below the true median), times 2**n, for k = 0, 1, ...
    limit, below, ways, rank = (1 - confidence) / 2, 0, 1, -1
    while rank < count // 2:
        below += ways
        if below / 2**count > limit:
            break
        rank += 1
        ways = ways * (count - rank) // (rank + 1)
    return rank


def _distance(factor: float) -> float:
    return max(factor, 1 / factor)
