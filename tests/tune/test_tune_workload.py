"""A tuning for several sizes: the best for the whole that is nowhere much slower, or two recipes."""

import random
from dataclasses import replace
from operator import mul

import pytest
import torch
from torch import nn

from clocks import Clock, noisy
from prepare import Workload
from prepare.core.document import ReportContext, Text
from prepare.stages.tune import tune
from prepare.stages.tune.candidates import Candidate
from prepare.stages.tune.compare_candidates import CheckResult
from prepare.stages.tune.document import tune_document
from prepare.stages.tune.race import Race
from prepare.stages.tune.records import UNPREPARED, ForSizes, Tuning
from prepare.stages.tune.stage import TuneStage


class SizedRunner:
    """A runner whose calls of each size take a given time on a simulated clock."""

    def __init__(self, clock, weights, spent):
        self._clock, self._weights, self._spent = clock, weights, spent
        self.parts = tuple(each() for each in spent)
        self.seconds, self.peak, self.first_seconds = sum(self.parts), None, 0.0

    def turn(self, number):
        self.parts = tuple(each() for each in self._spent)
        self._clock.now += sum(self.parts)
        return sum(map(mul, self._weights, self.parts)) / sum(self._weights)


def raced(means, weights=(1.0, 1.0), *, wrong=(), spread=0.005, budget=60.0):
    clock = Clock()

    def start(candidate):
        order = random.Random(candidate.name)
        spent = [noisy(mean, spread, order.random()) for mean in means[candidate.name]]
        return SizedRunner(clock, weights, spent)

    race = Race(
        [Candidate(name, {} if name == UNPREPARED else {"some_step": {}}) for name in means],
        start=start,
        check=lambda candidate, _: CheckResult(
            "fail" if candidate.name in wrong else "pass", "off"
        ),
        budget=budget,
        clock=clock,
        weights=weights,
    )
    winner = race.run()
    return winner.name, race.second and race.second.name, race


def test_the_best_for_the_weighted_whole_wins():
    means = {UNPREPARED: (0.1, 0.1), "first": (0.05, 0.095), "second": (0.095, 0.05)}
    assert raced(means, weights=(10.0, 1.0))[:2] == ("first", "second")
    assert raced(means, weights=(1.0, 10.0))[:2] == ("second", "first")
    # A size without weight does not count, however slow it is.
    assert raced(means, weights=(1.0, 0.0))[:2] == ("first", None)


def test_a_recipe_that_is_nowhere_slower_is_preferred():
    means = {
        UNPREPARED: (0.1, 0.1),
        "fast": (0.050, 0.097),
        "even": (0.0555, 0.090),
        "both": (0.0505, 0.0905),
    }
    assert raced(means)[:2] == ("both", None)
    # The whole is 0.1455 and 0.147, and `fast` takes 8 % more than `even` at the second size.
    means = {
        UNPREPARED: (0.1, 0.1),
        "fast": (0.0500, 0.0955),
        "even": (0.0508, 0.0885),
        "last": (0.0558, 0.0880),
    }
    assert raced(means)[:2] == ("even", None)


def test_a_recipe_and_the_unprepared_model_may_be_the_two():
    winner, second, race = raced({UNPREPARED: (0.1, 0.1), "prepared": (0.5 * 0.1, 1.1 * 0.1)})
    assert (winner, second) == ("prepared", UNPREPARED)
    assert race.second.status == "slower"
    winner, second, _ = raced({UNPREPARED: (0.1, 0.1), "prepared": (0.9 * 0.1, 1.2 * 0.1)})
    assert (winner, second) == (UNPREPARED, "prepared")


def test_a_second_recipe_is_verified_too():
    means = {UNPREPARED: (0.1, 0.1), "first": (0.05, 0.095), "second": (0.095, 0.05)}
    winner, second, race = raced(means, weights=(10.0, 1.0), wrong=("second",))
    assert (winner, second) == ("first", None)
    assert {each.name: each.status for each in race.contestants}["second"] == "wrong"


def test_equal_recipes_are_not_told_to_be_two():
    means = {UNPREPARED: (0.1, 0.1), "a": (0.08, 0.08), "b": (0.08, 0.081), "c": (0.081, 0.08)}
    pairs = [raced(means, spread=0.03, budget=20.0)[1] for _ in range(3)]
    assert pairs == [None] * 3


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4), nn.Conv2d(4, 2, 3)).eval()


WORKLOAD = Workload([torch.randn(1, 3, 8, 8), torch.randn(2, 3, 8, 8)], weights=[3, 1])


@pytest.fixture(scope="module")
def tuning():
    return tune(net(), WORKLOAD, budget=0.2, cache=False)


def test_every_recipe_is_timed_at_each_size(tuning, tmp_path):
    assert [size.name for size in tuning.sizes] == ["batch 1", "batch 2"]
    base = tuning.row(UNPREPARED)
    assert [each.ratio for each in base.sizes] == [1.0, 1.0]
    assert all(each.seconds for each in base.sizes)
    assert base.seconds is not None
    tuning.save(tmp_path / "tune.json")
    assert Tuning.load(tmp_path / "tune.json") == tuning
    document = tune_document(ReportContext(found={"tune": tuning}))
    assert "batch 1, weight 3" in str(list(document.shown("page")))


def test_a_cached_tuning_is_of_the_same_sizes_and_weights(monkeypatch, tmp_path):
    monkeypatch.setattr("prepare.stages.tune.cache._MAX_NOISE", 1e9)
    monkeypatch.setattr("prepare.stages.bench.statistics.noise", lambda control: 1.0)
    found = [
        tune(net(), workload, budget=0.2, cache=tmp_path).from_cache
        for workload in (WORKLOAD, WORKLOAD, Workload(WORKLOAD.examples), WORKLOAD.examples[0])
    ]
    assert found == [False, True, False, False]


def test_two_recipes_are_told_with_the_sizes_that_each_is_for(tuning):
    other = next(row.name for row in tuning.rows if row.name != tuning.winner)
    pair = (ForSizes(tuning.winner, ("batch 2",)), ForSizes(other, ("batch 1",)))
    found = replace(tuning, better=pair)
    text = f"{tuning.winner} at batch 2; {other} at batch 1"
    document = tune_document(ReportContext(found={"tune": found}))
    assert document.answers[0].answer == f"Two recipes are better: {text}"
    shown = [part.text for part in document.shown("terminal") if isinstance(part, Text)]
    assert f"two recipes are better: {text}" in shown
    assert TuneStage.figures({"tune": found})["second_recipe"] == other
