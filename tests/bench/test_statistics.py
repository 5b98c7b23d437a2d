"""The statistics of a bench, on samples with known answers."""

import math
import random

import pytest
import torch

from clocks import Clock
from prepare.stages.bench import compare, compare_variants, statistics
from prepare.stages.bench.statistics import Estimate, estimate, ratio, verdict


def machine(order, rounds, factors):
    """Times on a machine that drifts from round to round and now and then does something else."""
    drift, lanes = 0.0, [[] for _ in factors]
    for _ in range(rounds):
        drift = 0.9 * drift + order.gauss(0, 0.1)
        for lane, factor in zip(lanes, factors, strict=True):
            hiccup = order.choice([0.5, 1.0, 2.0]) if order.random() < 0.1 else 0.0
            lane.append(factor * math.exp(drift + order.gauss(0, 0.03)) * (1 + hiccup))
    return lanes


def simulated(cases, factor, *, rounds=40, stops=True):
    """The verdict on a variant that takes `factor` of the baseline's time, and if its interval holds."""
    order, words, holds = random.Random(1), [], 0
    for _ in range(cases):
        base, again, other = machine(order, rounds, (1.0, 1.0, factor))
        for count in range(20 if stops else rounds, rounds + 1, 5):
            first = base[:count]
            found, control = (ratio(lane[:count], first, 0.95) for lane in (other, again))
            if max(found.precision, control.precision) <= 0.02:
                break
        words.append(verdict(found, statistics.noise(control)))
        holds += found.interval[0] <= factor <= found.interval[1]
    return words, holds / cases


@pytest.mark.parametrize("stops", [False, True])
def test_the_ratio_interval_covers_the_true_ratio_as_often_as_stated(stops):
    _, holds = simulated(600, 1.1, stops=stops)
    # 95 % of 600 cases, less two and a half standard deviations of that count.
    assert holds >= 0.93


def looked(monkeypatch, cases, factor, rounds):
    """The results of comparisons on that machine, in the time of so many rounds."""
    monkeypatch.setattr(compare_variants, "environment", dict)
    order, found = random.Random(3), []
    for _ in range(cases):
        clock, (base, again, other) = Clock(), machine(order, 2 * rounds, (1.0, 1.0, factor))
        both = [each for pair in zip(base, again, strict=True) for each in pair]
        variants = {
            name: clock.takes(iter([1.0] * 2 + times).__next__)
            for name, times in {"base": both, "other": other}.items()
        }
        how = {"budget": 4 + rounds * (2 + factor), "precision": None}
        found.append(compare(variants, torch.ones(1), _clock=clock, **how))
    return found


def part_of(found, *words):
    return sum(each.row("other").verdict in words for each in found) / len(found)


def part_that_holds(found, factor):
    intervals = [each.row("other").ratio_interval for each in found]
    return sum(low <= factor <= high for low, high in intervals) / len(found)


@pytest.mark.parametrize("rounds", [12, 40, 100])
def test_looks_find_no_difference_of_equals_in_95_of_100(monkeypatch, rounds):
    found = looked(monkeypatch, 200, 1.0, rounds)
    assert part_of(found, "faster", "slower") <= 0.05
    assert part_that_holds(found, 1.0) >= 0.93


def test_looks_end_early_for_a_clear_difference(monkeypatch):
    found = looked(monkeypatch, 200, 0.7, 100)
    assert part_of(found, "faster") >= 0.99
    ends = [each.repeats for each in found]
    assert min(ends) == 8
    assert sum(ends) / len(ends) < 30
    assert part_that_holds(found, 0.7) >= 0.95


@pytest.mark.parametrize(("factor", "word"), [(1.1, "slower"), (0.9, "faster")])
def test_a_true_difference_of_ten_percent_is_found(factor, word):
    words, _ = simulated(300, factor)
    assert words.count(word) / len(words) >= 0.95
    assert {*words} <= {word, "unclear"}


def test_interval_ends_are_the_values_in_published_tables():
    # Le Boudec, table A.1: for 20 values the 6th and the 15th, for 50 the 18th and the 33rd.
    assert estimate(range(1, 21), 0.95) == Estimate(10.5, (6, 15))
    assert estimate(range(50, 0, -1), 0.95) == Estimate(25.5, (18, 33))
    assert estimate(range(1, 7), 0.95).interval == (1, 6)


def test_too_few_values_give_no_interval_and_no_verdict():
    found = estimate(range(1, 6), 0.95)
    assert found == Estimate(3, None)
    assert found.precision == math.inf
    assert verdict(Estimate(0.5, None), 1.01) == "unclear"
    assert verdict(Estimate(0.5, (0.4, 0.6)), statistics.noise(Estimate(1.0, None))) == "unclear"
    assert [statistics.min_values(level) for level in (0.95, 0.99)] == [6, 8]


@pytest.mark.parametrize(
    ("found", "control", "word"),
    [
        (Estimate(0.90, (0.88, 0.92)), (0.99, 1.01), "faster"),
        (Estimate(1.10, (1.08, 1.12)), (0.99, 1.01), "slower"),
        (Estimate(0.98, (0.96, 1.001)), (0.99, 1.01), "unclear"),
        (Estimate(1.02, (1.01, 1.03)), (0.99, 1.04), "no difference"),
        (Estimate(1.02, (1.01, 1.04)), (0.96, 1.00), "unclear"),
        (Estimate(1.01, (0.98, 1.03)), (0.80, 1.50), "no difference"),
        (Estimate(1.00, (0.96, 1.02)), (0.99, 1.01), "unclear"),
        (Estimate(0.98, (0.97, 0.99)), (0.99, 1.04), "no difference"),
    ],
)
def test_a_verdict_needs_an_interval_without_1_beyond_the_noise(found, control, word):
    assert verdict(found, statistics.noise(Estimate(1.0, control))) == word


def test_paired_ratios_cancel_the_slowdown_of_a_whole_round():
    base, other = machine(random.Random(3), 200, (1.0, 1.1))
    alone, paired = estimate(other, 0.95), ratio(other, base, 0.95)
    assert paired.precision < alone.precision / 2
    assert paired.interval[0] < 1.1 < paired.interval[1]
