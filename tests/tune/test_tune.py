"""Tuning: the race on a clock that is told the time, the candidates, the cache, and whole runs."""

import json
import math
import os
import random
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn

from clocks import Clock, noisy
from paths import PYTHONPATH
from prepare import recipe
from prepare.cli import main as cli
from prepare.errors import ConfigError, ModelError, RefusedError, TuneError
from prepare.pipeline import Pipeline
from prepare.registry import STEPS
from prepare.report.sentences import tune_sentence
from prepare.report.terminal.tune import show_tune
from prepare.step import ModuleStep
from prepare.tune import Row, Tuning, candidate_run, session, tune
from prepare.tune import cache as caching
from prepare.tune.candidate_run import PreparedCandidate
from prepare.tune.candidates import AS_DECLARED, Candidate, candidates
from prepare.tune.contestants import CandidateError, CheckResult
from prepare.tune.race import Race
from prepare.tune.records import UNPREPARED
from sample_nets import wrong_in_training

BATCH = torch.ones(2, 3, 12, 12)


def bits(model):
    return [(name, tensor.stride(), tensor.tolist()) for name, tensor in model.state_dict().items()]


def small():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3))


# ------------------------------------------------------------------------------ the race


class Scripted:
    """A candidate whose calls take as long as it is told, on a clock of its own."""

    def __init__(self, clock, spent, *, breaks_at=math.inf):
        self._clock, self._spent, self._left = clock, spent, breaks_at
        self.seconds, self.peak = spent(), None

    def turn(self, number):
        self._left -= 1
        if self._left < 0:
            raise CandidateError("no more")
        taken = self._spent()
        self._clock.now += taken
        return taken


class Told:
    """A race of candidates with the mean times given; keeps count of what was asked of it."""

    def __init__(
        self, means, *, budget=100.0, spread=0.01, steps=None, checks=(), starts=(), breaks=(),
        seed=0, capacity=1000, checking=0.0,
    ):  # fmt: skip
        self.clock, self.checked, self.alive, self.most = Clock(), [], Counter(), 0
        self._means, self._spread, self._seed, self._checking = means, spread, seed, checking
        self._checks, self._starts, self._breaks = dict(checks), dict(starts), dict(breaks)
        made = {UNPREPARED: {}} | {name: {"some_step": {}} for name in list(means)[1:]}
        made |= steps or {}
        self.race = Race(
            [Candidate(name, made[name]) for name in means],
            start=self.start, check=self.check, budget=budget, clock=self.clock,
            capacity=capacity, seed=seed,
        )  # fmt: skip

    def start(self, candidate):
        took = self._starts.get(candidate.name, 0.0)
        if isinstance(took, str):
            raise CandidateError(took)
        self.clock.now += took
        live = [each.name for each in self.race.standings.live()]
        self.most = max(self.most, len({UNPREPARED, *live, candidate.name}))
        order = random.Random(f"{self._seed} {candidate.name}")
        spent = noisy(self._means[candidate.name], self._spread, order.random())
        return Scripted(self.clock, spent, breaks_at=self._breaks.get(candidate.name, math.inf))

    def check(self, candidate, runner):
        self.checked.append(candidate.name)
        self.clock.now += self._checking
        return self._checks.get(candidate.name, CheckResult("pass", error=1e-6, allowed=1e-5))

    def run(self):
        self.winner = self.race.run()
        self.by_name = {each.name: each for each in self.race.contestants}
        return self


FAIL, UNSURE = CheckResult("fail", "outputs: off"), CheckResult("cannot tell", "there is no time")


def test_the_fastest_wins_and_every_loser_is_told_why():
    told = Told({UNPREPARED: 0.1, "quick": 0.08, "slow": 0.0825, "equal": 0.1}).run()
    assert told.winner.name == "quick"
    assert told.winner.reason.startswith("takes 0.80 of the time of the unprepared model (0.7")
    slow = told.by_name["slow"]
    assert (slow.status, slow.runner) == ("slower", None)
    assert slow.reason.startswith("takes 1.0")
    assert "times as long as quick (1.0" in slow.reason
    assert told.by_name[UNPREPARED].status == told.by_name["equal"].status == "slower"
    assert told.checked == ["quick"]


def test_of_equals_the_unprepared_model_wins_in_93_of_100_races():
    won = [
        Told(dict.fromkeys((UNPREPARED, "a", "b", "c"), 0.1), spread=0.05, seed=seed, budget=20.0)
        .run()
        .winner
        for seed in range(100)
    ]
    assert sum(each.name == UNPREPARED for each in won) >= 93


def test_on_a_machine_that_others_use_too_nobody_wins_by_luck(monkeypatch):
    def shared(mean, spread, seed):
        order = random.Random(seed)
        return lambda: mean * order.choice([1, 4])

    monkeypatch.setitem(globals(), "noisy", shared)
    times = dict.fromkeys((UNPREPARED, *"abcdefghij"), 0.1)
    won = [Told(times, seed=seed, budget=20.0).run().winner.name for seed in range(40)]
    assert won.count(UNPREPARED) >= 38


def test_a_true_difference_of_a_tenth_is_found_in_95_of_100_races():
    times = {UNPREPARED: 0.1, "a": 0.1, "tenth": 0.09}
    won = [Told(times, spread=0.05, seed=seed).run().winner.name for seed in range(100)]
    assert won.count("tenth") >= 95


RICHER = {"rich": {"some_step": {}, "half": {}}, "simple": {"conv2d_memory_format": {}}}


@pytest.mark.parametrize(("rich", "winner"), [(0.08, "simple"), (0.0792, "simple"), (0.07, "rich")])
def test_a_richer_recipe_wins_only_where_it_is_faster_by_more_than_two_percent(rich, winner):
    times = {UNPREPARED: 0.1, "rich": rich, "simple": 0.08}
    races = [Told(times, steps=RICHER, spread=0.005, seed=seed).run() for seed in range(40)]
    assert Counter(race.winner.name for race in races)[winner] >= 38
    loser = races[0].by_name["simple" if winner == "rich" else "rich"]
    assert re.match(
        rf"takes \d\.\d\d times as long as {winner}(, which is simpler| \()", loser.reason
    )


def test_among_recipes_the_faster_one_needs_no_proof_and_against_the_unprepared_model_it_does():
    times = {UNPREPARED: 1.0, "simple": 0.9, "rich": 0.8, **dict.fromkeys("abcdef", 0.9)}
    races = [Told(times, steps=RICHER, spread=0.1, seed=s, budget=150.0).run() for s in range(40)]
    assert Counter(race.winner.name for race in races)["rich"] >= 34


def test_who_is_surely_faster_than_the_unprepared_model_takes_it_out_where_another_may_be_faster_still():
    told = Told({UNPREPARED: 1.0, "sure": 0.9, "wild": 0.8})
    base, sure, wild = told.race.contestants
    for each in (base, sure, wild):
        each.runner = Scripted(told.clock, lambda: 1.0)
    for number in range(20):
        base.times[number] = told.race.standings.control.times[number] = 1.0
        sure.times[number] = 0.9
        wild.times[number] = 0.8 if number % 10 < 7 else 1.5
    assert not told.race.standings.is_better(wild)
    told.race._eliminate_slower()
    assert [(each.name, each.status) for each in told.race.contestants] == [
        (UNPREPARED, "slower"), ("sure", "slower"), ("wild", "")]  # fmt: skip
    assert base.reason.startswith("takes 1.11 times as long as sure")
    assert told.checked == ["sure", "wild"]
    told.race._disqualify(wild, "failed", "no more")  # nobody that runs is proven now
    assert [(each.name, each.status) for each in told.race.contestants] == [
        (UNPREPARED, ""), ("sure", ""), ("wild", "failed")]  # fmt: skip
    assert told.race.standings.live() == [base]


def test_the_ratio_of_one_that_was_out_early_is_told_by_way_of_the_winner():
    told = Told({UNPREPARED: 1.0, "winner": 0.8, "early": 0.9})
    base, winner, early = told.race.contestants
    for number in range(30):
        base.times[number] = told.race.standings.control.times[number] = 2.0 if number < 3 else 1.0
        winner.times[number] = 0.8
    early.times.update(dict.fromkeys(range(3), 0.9))
    assert told.race.standings.ratio(early).value == pytest.approx(0.45)
    assert told.race.standings.final_ratio(early, winner).value == pytest.approx(0.9)
    assert told.race.standings.final_ratio(winner, winner) == told.race.standings.ratio(winner)
    assert told.race.standings.final_ratio(early, base) == told.race.standings.ratio(early)


def test_nobody_loses_to_one_that_is_wrong():
    times = {UNPREPARED: 0.1, "wrong": 0.02, "unsure": 0.04, "right": 0.08}
    told = Told(times, checks={"wrong": FAIL, "unsure": UNSURE}).run()
    assert told.winner.name == "right"
    assert told.checked == ["wrong", "unsure", "right"]
    assert told.by_name["wrong"].status == "wrong"
    assert told.by_name["wrong"].reason == "its verification failed: outputs: off"
    assert told.by_name["unsure"].status == "cannot tell"
    assert told.by_name["unsure"].reason == "it could not be verified: there is no time"


LONG_CHECKS = {
    "budget": 60.0,
    "spread": 0.1,
    "checking": 12.0,
    "starts": dict.fromkeys("abcdefg", 2.0),
}


@pytest.mark.parametrize(
    ("checks", "good", "races"),
    [({}, "acg", 36), ({"a": FAIL, "g": UNSURE}, "c", 28)],
    ids=["right", "wrong"],
)
def test_verifications_that_take_long_leave_enough_rounds(checks, good, races):
    times = dict(zip("abcdefg", (0.65, 1.2, 0.7, 0.9, 1.0, 0.95, 0.66), strict=True))
    told = [
        Told({UNPREPARED: 1.0} | times, checks=checks, seed=seed, **LONG_CHECKS).run()
        for seed in range(40)
    ]
    assert sum(race.winner.name in good for race in told) >= races
    assert max(race.clock.now for race in told) < 1.5 * 60 + 12 + 5


def test_who_comes_back_too_late_says_so():
    told = Told({UNPREPARED: 1.0, "wrong": 0.5, "right": 0.6}, checks={"wrong": FAIL})
    race, (base, wrong, right) = told.race, told.race.contestants
    for each, seconds in ((base, 1.0), (race.standings.control, 1.0), (wrong, 0.5), (right, 0.6)):
        each.runner = Scripted(told.clock, lambda: 1.0)
        each.times.update(dict.fromkeys(range(3), seconds))
    race._eliminate(right, "slower", "takes 1.20 times as long as wrong", wrong)
    assert race._conclude() is base
    assert [each.status for each in race.contestants] == ["winner", "wrong", "not measured"]
    late = "no time was left to try it again, after the recipe that had eliminated it was dropped"
    assert right.reason == late


def test_where_none_is_right_the_unprepared_model_wins():
    told = Told({UNPREPARED: 0.1, "a": 0.05, "b": 0.06}, checks={"a": FAIL, "b": FAIL}).run()
    assert told.winner.name == UNPREPARED
    assert told.winner.reason == "no verified recipe is significantly faster"


def test_one_that_cannot_start_or_breaks_later_is_out_and_the_others_go_on():
    told = Told(
        {UNPREPARED: 0.1, "never": 0.05, "later": 0.05, "quick": 0.08},
        starts={"never": "avg_pool3d: not implemented for bfloat16"},
        breaks={"later": 8},
    ).run()
    assert told.winner.name == "quick"
    assert told.by_name["never"].reason == "avg_pool3d: not implemented for bfloat16"
    assert told.by_name["later"].status == told.by_name["never"].status == "failed"


def test_the_best_that_breaks_late_does_not_leave_the_race_without_a_winner():
    told = Told({UNPREPARED: 0.1, "quick": 0.05}, breaks={"quick": 14}, budget=5.0).run()
    assert told.winner.name == UNPREPARED
    assert told.by_name["quick"].reason == "no more"


@pytest.mark.parametrize("how", ["starts", "breaks"])
def test_where_the_unprepared_model_does_not_run_there_is_no_race(how):
    told = Told({UNPREPARED: 0.1, "a": 0.1}, **{how: {UNPREPARED: "no" if how == "starts" else 4}})
    with pytest.raises(CandidateError, match="no"):
        told.run()


def test_one_without_prospect_is_out_after_three_rounds():
    told = Told({UNPREPARED: 0.1, "awful": 1.5}).run()
    assert len(told.by_name["awful"].times) == 3
    assert re.fullmatch(
        r"takes 1\d\.\d\d times as long as unprepared \(1\d\.\d\d to 1\d\.\d\d\)",
        told.by_name["awful"].reason,
    )


def test_a_difference_of_a_fifth_is_found_in_six_rounds_where_calls_take_seconds():
    times = {UNPREPARED: 2.0, "quick": 1.6} | {f"slow {n}": 2.4 for n in range(5)}
    won = [Told(times, spread=0.02, seed=seed).run().winner for seed in range(40)]
    assert all(each.name == "quick" for each in won)


def test_few_rounds_of_equals_do_not_make_a_winner():
    times = dict.fromkeys((UNPREPARED, *"abcdefghij"), 1.0)
    for rounds in (3, 6, 9, 15):
        races = [
            Told(times, spread=0.05, seed=seed, budget=12.0 * rounds + 12) for seed in range(60)
        ]
        won = [race.run().winner.name for race in races]
        assert won.count(UNPREPARED) >= 56, rounds


def test_it_stops_when_it_is_clear_and_else_when_the_budget_is_spent():
    clear = Told({UNPREPARED: 0.1, "quick": 0.08}, spread=0.01).run()
    assert clear.clock.now < 20
    unclear = Told({UNPREPARED: 0.1, "same": 0.1}, spread=0.4, budget=20.0).run()
    assert 19 < unclear.clock.now < 21


def test_who_finds_no_time_is_not_measured_and_says_so():
    times = {UNPREPARED: 2.0} | {f"recipe {n}": 2.0 for n in range(9)}
    told = Told(times, budget=60.0).run()
    late = [each for each in told.race.contestants if each.status == "not measured"]
    assert 0 < len(late) < 9
    assert late[0].reason == "no time was left to try it"
    assert told.clock.now <= 80


def test_a_budget_for_nothing_gives_the_unprepared_model():
    told = Told({UNPREPARED: 1.0, "a": 0.1}, budget=0.01).run()
    assert (told.winner.name, told.checked) == (UNPREPARED, [])


def test_no_more_copies_than_there_is_memory_for_run_at_a_time():
    times = {UNPREPARED: 0.1} | {f"recipe {n}": 0.1 - 0.01 * n for n in range(7)}
    told = Told(times, capacity=3).run()
    assert told.most == 3
    assert told.winner.name == "recipe 6"


COMPILING = {name: {"compile": {}, **more} for name, more in {
    "plain": {}, "slow one": {"slow": {}}, "quick one": {"quick": {}}}.items()}  # fmt: skip


def test_what_compiles_comes_after_the_others_the_most_promising_first():
    times = {
        UNPREPARED: 0.1,
        "slow": 0.2,
        "quick": 0.08,
        "plain": 0.09,
        "slow one": 0.1,
        "quick one": 0.05,
    }
    steps = COMPILING | {"slow": {"slow": {}}, "quick": {"quick": {}}}
    starts = dict.fromkeys(COMPILING, 15.0)
    told = Told(times, steps=steps, starts=starts, budget=60.0).run()
    assert told.winner.name == "quick one"
    assert min(told.by_name["quick one"].times) > max(told.by_name["slow"].times)
    assert min(told.by_name["quick one"].times) < min(told.by_name["plain"].times)


def test_each_compiler_is_tried_once_and_then_the_fastest_on_other_recipes():
    good, bad = {"backend": "good"}, {"backend": "bad"}
    quick = {"quick": {}}
    steps = {"quick": quick, "bad": {"compile": bad}, "good": {"compile": good}}
    steps |= {"quick + bad": {**quick, "compile": bad}, "quick + good": {**quick, "compile": good}}
    times = {UNPREPARED: 0.1, "quick": 0.08, "bad": 0.1, "good": 0.07}
    times |= {"quick + bad": 0.09, "quick + good": 0.06}
    told = Told(times, steps=steps, starts=dict.fromkeys(steps, 5.0), budget=80.0).run()
    begun = [
        min(told.by_name[name].times) for name in ("quick + bad", "quick + good", "good", "bad")
    ]
    assert begun == sorted(set(begun))
    assert told.winner.name == "quick + good"


@pytest.mark.parametrize(("cast", "first"), [(0.05, "cast + a"), (0.09, "b")])
def test_compilers_are_tried_in_the_order_of_the_precision_that_is_fastest(cast, first):
    a, b, half = {"compile": {"backend": "a"}}, {"compile": {"backend": "b"}}, {"half": {}}
    steps = {"cast": half, "quick": {"quick": {}}, "cast + a": half | a, "cast + b": half | b}
    steps |= {"b": {"quick": {}} | b, "a": {"quick": {}} | a}
    times = {UNPREPARED: 0.1, "cast": cast, "quick": 0.07}
    times |= dict.fromkeys(("cast + a", "cast + b", "b", "a"), 0.04)
    told = Told(times, steps=steps, starts=dict.fromkeys(steps, 5.0), budget=60.0).run()
    compiled = [told.by_name[name] for name in ("cast + a", "cast + b", "a", "b")]
    begun = {each.name: min(each.times) for each in compiled if each.times}
    assert min(begun, key=begun.get) == first


def test_each_precision_is_tried_before_a_compilation_that_takes_the_rest_of_the_time():
    cast = {"half": {"dtype": "bfloat16"}}
    steps = {f"cast {n}": {**cast, f"{n}": {}} for n in range(3)} | {"plain": {"compile": {}}}
    times = {UNPREPARED: 3.0} | dict.fromkeys(steps, 2.0) | {"quick": 1.5}
    told = Told(times, steps=steps, starts={"plain": 200.0}, budget=70.0).run()
    assert told.winner.name == "quick"
    begun = [min(told.by_name[name].times) for name in ("cast 0", "quick", "plain", "cast 2")]
    assert begun == sorted(begun)
    assert begun[1] < begun[2]


def test_where_there_is_time_for_two_recipes_each_precision_has_one():
    cast = {"half": {"dtype": "bfloat16"}}
    steps = {f"cast {n}": {**cast, f"{n}": {}} for n in range(3)}
    times = {UNPREPARED: 3.0} | dict.fromkeys(steps, 2.5) | {"quick": 1.5}
    told = Told(times, steps=steps, budget=44.0, spread=0.05).run()
    assert told.winner.name == "quick"
    assert min(told.by_name["quick"].times) == min(told.by_name["cast 0"].times) == 0


def test_what_takes_as_long_to_compile_as_the_last_one_is_not_begun_when_that_does_not_fit():
    times = {UNPREPARED: 0.1, "plain": 0.05, "quick one": 0.05}
    told = Told(times, steps=COMPILING, starts=dict.fromkeys(COMPILING, 40.0), budget=60.0).run()
    assert sorted(each.status for each in told.race.contestants) == [
        "not measured",
        "slower",
        "winner",
    ]
    assert told.clock.now < 66


def test_what_was_compiled_beyond_the_budget_is_timed_all_the_same():
    times = {UNPREPARED: 0.1, "plain": 0.08}
    told = Told(times, steps=COMPILING, starts={"plain": 500.0}, budget=60.0).run()
    assert told.winner.name == "plain"
    assert 6 <= len(told.by_name["plain"].times) <= 20


def test_what_was_compiled_beyond_the_budget_is_timed_as_long_when_its_verification_takes_long():
    times = {UNPREPARED: 0.1, "other": 0.1, "plain": 0.06}
    told = Told(times, steps=COMPILING, starts={"plain": 500.0}, checking=60.0).run()
    assert (told.winner.name, told.checked) == ("plain", ["plain"])
    assert 6 <= len(told.by_name["plain"].times) <= 20


def test_the_same_seed_gives_the_same_race():
    times = {UNPREPARED: 0.1, "a": 0.1, "b": 0.095}
    one, same = (Told(times, spread=0.1, seed=3).run() for _ in "ab")
    assert [each.times for each in one.race.contestants] == [
        each.times for each in same.race.contestants
    ]


def any_race(seed):
    """A race of whatever may come: wrong ones, some that break, that do not start, that compile."""
    draw = random.Random(seed)
    names = "abcdefgh"[: draw.randint(1, 8)]

    def some(part, value):
        return {name: value() for name in names if draw.random() < part}

    return Told(
        {UNPREPARED: 1.0} | {name: draw.choice([0.5, 0.6, 0.8, 0.9, 1.0, 2.0]) for name in names},
        spread=draw.choice([0.01, 0.05, 0.2, 0.4]),
        budget=draw.choice([10.0, 40.0, 100.0]),
        checking=draw.choice([0.0, 5.0, 30.0]),
        capacity=draw.choice([3, 5, 1000]),
        checks=some(0.35, lambda: draw.choice([FAIL, UNSURE])),
        breaks=some(0.25, lambda: draw.randint(3, 30)),
        steps={name: {"compile": {}, name: {}} for name in some(0.25, dict)},
        starts=some(0.5, lambda: draw.choice(["no", 1.0, 4.0, 4.0])),
        seed=seed,
    )


@pytest.mark.parametrize(
    "seeds", [range(60), pytest.param(range(60, 1000), marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_every_race_has_one_winner_that_is_right_and_says_what_became_of_all(seeds):
    won = Counter()
    for seed in seeds:
        told = any_race(seed).run()
        statuses = [each.status for each in told.race.contestants]
        assert statuses.count("winner") == 1, seed
        assert all(statuses), seed
        is_base = told.winner.name == UNPREPARED
        assert is_base or told.winner.checked.status == "pass", seed
        won[is_base] += 1
    assert min(won.values()) > len(seeds) / 10


# ------------------------------------------------------------------------------ candidates


def names(model, *, declared=None, allow=(), mode="eval"):
    model.train(mode == "train")
    found = candidates(model, declared=declared or {}, allow=allow, mode=mode)
    assert len({each.name for each in found}) == len(found)
    assert len({json.dumps(each.steps) for each in found}) == len(found)
    return [each.name for each in found]


def test_the_formats_are_those_of_the_ranks_that_are_there():
    convs = nn.Conv2d(3, 8, 3), nn.Conv3d(3, 8, 3)
    assert names(convs[0]) == [UNPREPARED, "channels_last + input", "channels_last"]
    kept = [n for n in names(convs[1]) if "repair" not in n]
    assert kept == [UNPREPARED, "channels_last_3d + input", "channels_last_3d"]
    assert [n for n in names(nn.Sequential(*convs)) if not {"input", "repair"} & {*n.split()}] == [
        UNPREPARED, "by_rank", "channels_last", "channels_last_3d"]  # fmt: skip
    assert names(nn.Linear(3, 3)) == [UNPREPARED]


def test_a_model_that_lies_in_channels_last_may_be_better_contiguous():
    model = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
    assert "contiguous" in names(model)


def test_repairs_are_tried_where_there_is_something_to_repair():
    found = names(wrong_in_training(), mode="train")
    assert "channels_last + repair" in found
    assert not any("repair" in name for name in names(small()))


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last_3d"])
def test_what_may_overwrite_memory_is_tried_in_no_format_without_its_repair(last):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv3d(3, 8, 3))
    if last:
        model[1].to(memory_format=torch.channels_last_3d)
    allow = ("bfloat16", "compile")
    found = candidates(model.train(), declared={}, allow=allow, mode="train")
    low = {each.name: each for each in found if "half" in each.steps}
    assert {"bfloat16 + repair", "bfloat16 + channels_last + repair"} < set(low)
    assert ("bfloat16 + contiguous + repair" in low) == last
    assert {each.compiles for each in low.values()} == {False, True}
    for each in low.values():
        pipeline = Pipeline.from_config(each.steps)
        said = [str(warning) for warning in pipeline.plan(model).warnings]
        assert not any("conv3d_bfloat16_small_cpu" in warning for warning in said)
    for kind, mode in ((nn.Conv2d, "train"), (nn.Conv3d, "eval")):
        assert "bfloat16" in names(kind(3, 8, 3), allow=allow, mode=mode)


@pytest.mark.skipif("fuse_conv_bn" not in STEPS, reason="there is no such step")
def test_norms_are_fused_in_inference_alone():
    assert "fuse" in names(small())
    assert "channels_last + fuse" in names(small())
    assert not any("fuse" in name for name in names(small(), mode="train"))
    assert not any("fuse" in name for name in names(nn.Conv2d(3, 8, 3)))


@pytest.mark.parametrize("word", ["bfloat16", "half"])
def test_sixteen_bits_are_tried_where_they_are_allowed(word):
    assert not any(word in name for name in names(small()))
    model = small().eval()
    found = candidates(model, declared={}, allow=(word,), mode="eval")
    low = [each for each in found if word in each.name]
    assert {"half", "input_format"} < {name for each in low for name in each.steps}
    assert all(each.steps["input_format"]["attach"] for each in low)
    assert {each.steps["half"]["dtype"] for each in low} == {"float16" if word == "half" else word}


@pytest.mark.skipif("compile" not in STEPS, reason="there is no such step")
def test_compilers_are_tried_where_they_are_allowed_and_frozen_in_inference_alone():
    assert not any(each in name for name in names(small()) for each in ("compile", "openvino"))
    found = names(nn.Conv2d(3, 8, 3), allow=("compile", "openvino"))
    assert [name for name in found if "channels" not in name] == [
        UNPREPARED, "openvino", "frozen compile", "compile"]  # fmt: skip
    assert "channels_last + input + compile" in found
    low = names(nn.Conv2d(3, 8, 3), allow=("bfloat16", "compile", "openvino"))
    assert [name for name in low if "bfloat16" in name and "channels" not in name] == [
        "bfloat16",
        *(f"bfloat16 + {each}" for each in ("frozen compile", "compile", "openvino")),
    ]
    assert not any("channels" in name and "openvino" in name for name in found)
    assert not any("frozen" in name for name in names(small(), allow=("compile",), mode="train"))


@pytest.mark.parametrize(("budget", "seconds"), [(2.0, 30.0), (90.0, 90.0)])
def test_a_verification_may_take_as_long_as_the_tuning(monkeypatch, budget, seconds):
    given, check_model = [], candidate_run.check_model

    def told(*args, **how):
        given.append(how["seconds"])
        return check_model(*args, **how)

    monkeypatch.setattr(candidate_run, "check_model", told)
    candidate, model = Candidate("flat", {"conv2d_memory_format": {}}), small().eval()
    runner = PreparedCandidate(model, candidate, [BATCH], mode="eval", clock=time.perf_counter)
    assert runner.check(model, BATCH, {}, budget=budget).status == "pass"
    assert given == [seconds]


def test_what_was_declared_is_a_candidate_and_its_device_holds_for_all():
    declared = {"device": {"device": "cpu"}, "half": {"dtype": "bfloat16"}}
    found = candidates(small().eval(), declared=declared, allow=(), mode="eval")
    assert [each.name for each in found[:2]] == [UNPREPARED, AS_DECLARED]
    assert found[0].steps == {"device": {"device": "cpu"}}
    assert found[1].steps == Pipeline.from_config(declared).to_config()
    assert all("device" in each.steps for each in found)
    assert AS_DECLARED not in names(small(), declared={"device": {}, "half": None})


@pytest.mark.parametrize("mode", ["eval", "train"])
@pytest.mark.parametrize("make", [small, wrong_in_training])
def test_every_candidate_is_spelt_out_and_costs_more_than_nothing(make, mode):
    model = make().train(mode == "train")
    unprepared, *rest = candidates(model, declared={}, allow=("bfloat16",), mode=mode)
    assert (unprepared.steps, unprepared.cost) == ({}, 0)
    for each in rest:
        assert each.cost > 0
        assert Pipeline.from_config(each.steps).to_config() == each.steps


def test_looking_for_candidates_touches_nothing():
    model = wrong_in_training()
    before, kinds = bits(model), [type(module) for module in model.modules()]
    candidates(model, declared={}, allow=("bfloat16",), mode="train")
    assert (bits(model), [type(module) for module in model.modules()]) == (before, kinds)


# ------------------------------------------------------------------------------ whole tunings


@pytest.fixture
def timed(monkeypatch):
    """Says how long a call of each candidate takes, in the place of the clock; all else is real."""
    means = {}

    class Timed(PreparedCandidate):
        def __init__(self, model, candidate, pool, **how):
            super().__init__(model, candidate, pool, **how)
            self._mean = means.get(candidate.name, 0.1)
            self._order, self.seconds = random.Random(candidate.name), 1e-3

        def turn(self, number):
            return self._mean * math.exp(self._order.gauss(0, 0.002))

    monkeypatch.setattr(session, "PreparedCandidate", Timed)
    return means


def found_with(timed, means, model, batch=BATCH, **how):
    timed.update(means)
    return tune(model, batch, **({"cache": False, "budget": 5.0} | how))


def test_the_answer_is_a_pipeline_a_recipe_and_a_row_for_each_candidate(timed, tmp_path):
    model = small().eval()
    found = found_with(timed, {"channels_last": 0.05}, model)
    assert (found.winner, found.mode, found.from_cache) == ("channels_last", "eval", False)
    assert found.rows[0].name == found.winner
    assert found.row("channels_last").verified == "pass"
    assert found.row("channels_last").error <= found.row("channels_last").allowed
    assert found.row(UNPREPARED).ratio == 1.0
    assert found.row("channels_last").ratio == pytest.approx(0.5, rel=0.02)
    assert found.recipe == {"conv2d_memory_format": {
        "memory_format": "channels_last", "include": [], "exclude": []}}  # fmt: skip
    found.pipeline.save(tmp_path / "recipe.yaml")
    assert recipe.load(tmp_path / "recipe.yaml") == found.recipe
    assert found.table.splitlines()[0].startswith("channels_last ")
    assert len(found.table.splitlines()) == len(found.rows)
    assert not found.pipeline.plan(found.pipeline.apply(model))


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_the_model_and_everything_global_stay_as_they_were(timed, mode):
    model = wrong_in_training()
    model[0].weight.grad = torch.ones_like(model[0].weight)
    before, state, training = bits(model), torch.get_rng_state(), model.training
    kinds = [type(module) for module in model.modules()]
    found_with(timed, {}, model, mode=mode)
    assert bits(model) == before
    assert torch.equal(torch.get_rng_state(), state)
    assert (model.training, [type(m) for m in model.modules()]) == (training, kinds)
    assert torch.equal(model[0].weight.grad, torch.ones_like(model[0].weight))


@pytest.mark.parametrize("at", [1, 4, 9])
def test_an_interrupt_leaves_nothing_behind(timed, monkeypatch, at, tmp_path):
    model, calls = wrong_in_training(), []
    before, kinds = bits(model), [type(module) for module in model.modules()]
    plain = session.PreparedCandidate.turn

    def interrupted(self, number):
        calls.append(number)
        if len(calls) == at:
            raise KeyboardInterrupt
        return plain(self, number)

    monkeypatch.setattr(session.PreparedCandidate, "turn", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tune(model, BATCH, cache=tmp_path / "cache", budget=2.0)
    assert (bits(model), [type(m) for m in model.modules()]) == (before, kinds)
    assert not list(tmp_path.rglob("*"))


def test_a_layout_with_wrong_gradients_does_not_win_a_training(timed):
    torch.manual_seed(0)
    batch = torch.randn(1, 3, 16, 16)
    fast = {"channels_last": 0.01, "channels_last + input": 0.01, "channels_last + repair": 0.05}
    found = found_with(timed, fast, wrong_in_training(), batch, mode="train")
    assert found.winner == "channels_last + repair"
    assert found.row("channels_last").status == "failed"
    assert "gives wrong gradients" in found.row("channels_last").reason


def test_a_recipe_that_is_wrong_does_not_win(timed, plugin):
    @plugin("bends")
    class Bends(ModuleStep):
        """Takes another activation."""

        def targets(self, model):
            return (name for name, module in model.named_modules() if type(module) is nn.ReLU)

        def rewrite(self, model, name):
            return {name: nn.Tanh()}

    declared = {"bends": {}}
    found = found_with(timed, {AS_DECLARED: 0.01}, small().eval(), declared=declared)
    lost = found.row(AS_DECLARED)
    assert (found.winner, lost.status, lost.verified) == (UNPREPARED, "wrong", "fail")
    assert lost.error > lost.allowed


def test_bfloat16_wins_where_it_is_allowed_fast_and_right(timed):
    found = found_with(timed, {"bfloat16": 0.03}, small().eval(), allow=["bfloat16"])
    assert found.winner == "bfloat16"
    assert found.pipeline.apply(small())(BATCH).dtype == torch.bfloat16


class Pools(nn.Module):
    def forward(self, x):
        return nn.functional.avg_pool3d(x, 2)


def test_a_candidate_that_raises_says_why_it_is_out(timed):
    model = nn.Sequential(nn.Conv3d(1, 2, 3), Pools())
    found = found_with(timed, {}, model, torch.ones(1, 1, 8, 8, 8), allow=["bfloat16"])
    lost = found.row("bfloat16")
    assert lost.status == "failed"
    assert "not implemented for 'BFloat16'" in lost.reason
    assert found.row(UNPREPARED).status == "winner"


def test_progress_says_what_is_going_on_who_is_ahead_and_how_much_time_is_left(timed):
    from contextlib import contextmanager

    said = []

    @contextmanager
    def progress(text):
        said.append(text)
        yield

    found_with(timed, {"channels_last": 0.05}, small().eval(), progress=progress)
    assert said[0] == "trying unprepared; 5 s left"
    assert any(
        text.startswith("verifying channels_last; best so far channels_last (0.50 of")
        for text in said
    )
    assert said[-1].endswith(" s left")


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"allow": ["fp16"]}, "tune.allow: 'fp16' is not allowed; did you mean 'half'? allowed: bfloat16, half, compile, openvino"),
        ({"allow": "bfloat"}, "tune.allow: 'bfloat' is not allowed; did you mean 'bfloat16'? allowed: bfloat16, half, compile, openvino"),
        ({"budget": 0}, "tune.budget: 0.0 is not a time; give seconds, as in 60"),
        ({"budget": math.inf}, "tune.budget: inf is not a time; give seconds, as in 60"),
        ({"allow": ["half"], "mode": "train"}, "tune.allow: parameters in float16 cannot be trained (mode=train); allow bfloat16, or nothing and use torch.autocast around the forward"),
        ({"allow": ["openvino"], "mode": "train"}, "tune.allow: OpenVINO is for inference, and this is mode=train; allow compile"),
        ({"mode": "test"}, "mode: 'test' is not a mode; allowed: eval, train"),
    ],
)  # fmt: skip
def test_a_wrong_argument_is_told_with_the_way_out(how, message):
    with pytest.raises((ConfigError, RefusedError)) as error:
        tune(small(), BATCH, **how)
    assert str(error.value) == message


def test_a_model_that_cannot_be_tuned_is_refused():
    with pytest.raises(RefusedError, match="lazy module"):
        tune(nn.LazyConv2d(3, 3), BATCH)
    with pytest.raises(RefusedError, match="meta holds no data"):
        tune(nn.Conv2d(3, 3, 3, device="meta"), BATCH)
    with pytest.raises(RefusedError, match="inference_mode"), torch.inference_mode():
        tune(small(), BATCH)
    with pytest.raises(ModelError, match="the unprepared model: forward of 0"):
        tune(small(), torch.ones(2, 5, 12, 12), cache=False)
    stubborn = small()
    stubborn.handle = sys.stdout
    with pytest.raises(RefusedError, match="cannot be copied"):
        tune(stubborn, BATCH)


def test_all_take_their_turns_as_the_unprepared_model_does(monkeypatch):
    plans = []
    plain = PreparedCandidate._timed

    def timed(self, batch, plan):
        plans.append(plan)
        return plain(self, batch, plan)

    monkeypatch.setattr(PreparedCandidate, "_timed", timed)
    tune(small(), BATCH, budget=0.5, cache=False)
    assert len({plan for plan in plans if plan.warm}) == 1


# ------------------------------------------------------------------------------ the cache


def test_the_answer_is_kept_and_verified_again(timed, tmp_path):
    how = {"cache": tmp_path}
    first = found_with(timed, {"channels_last": 0.05}, small().eval(), **how)
    again = found_with(timed, {"channels_last": 0.5}, small().eval(), **how)
    assert (first.from_cache, again.from_cache) == (False, True)
    assert (again.winner, again.made, again.rows[1:]) == (first.winner, first.made, first.rows[1:])
    assert again.notes[0].startswith("from the cache, and verified again: measured ")
    assert " ago, on " in again.notes[0]
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"]


OTHERS = {
    "another batch size": {"batch": BATCH[:1]},
    "another dtype": {"batch": BATCH.double()},
    "another layout of the input": {"batch": BATCH.to(memory_format=torch.channels_last)},
    "more time": {"budget": 6.0},
    "more allowed": {"allow": ["bfloat16"]},
    "training": {"mode": "train"},
    "something declared": {"declared": {"half": {"dtype": "bfloat16"}}},
}


@pytest.mark.parametrize("name", OTHERS)
def test_it_holds_for_what_it_was_measured_on_alone(timed, tmp_path, name):
    how = {"cache": tmp_path, "budget": 1.0}
    model = small().double() if "dtype" in name else small()
    found_with(timed, {}, small().eval(), **how)
    assert not found_with(timed, {}, model.eval(), **(how | OTHERS[name])).from_cache


def test_it_holds_for_the_machine_and_the_structure_it_was_measured_with(monkeypatch):
    found = candidates(small(), declared={}, allow=(), mode="eval")

    def conditions(model=None):
        return caching.conditions(model or small(), BATCH, found, mode="eval")

    before = conditions()
    assert conditions() == before
    wider = nn.Sequential(nn.Conv2d(3, 9, 3))
    padded = small()
    padded[0].padding = (1, 1)
    lies = small().to(memory_format=torch.channels_last)
    assert all(conditions(model) != before for model in (wider, padded, lies))
    with monkeypatch.context() as patched:
        patched.setattr(
            "prepare.core.utils.environment._instructions", lambda described: ["another"]
        )
        assert conditions() != before  # a processor of the same name, with other instructions
    assert conditions() == before
    monkeypatch.setattr(torch, "get_num_threads", lambda: 99)
    assert conditions() != before


def test_what_won_before_and_is_wrong_now_is_measured_anew(timed, tmp_path, monkeypatch):
    how = {"cache": tmp_path}
    found_with(timed, {"channels_last": 0.05}, small().eval(), **how)
    monkeypatch.setattr(
        session.PreparedCandidate, "check", lambda *_, **__: CheckResult("fail", "outputs: off")
    )
    again = found_with(timed, {}, small().eval(), **how)
    assert (again.from_cache, again.winner) == (False, UNPREPARED)
    assert "the cached winner channels_last was not used: outputs: off" in again.notes


def test_a_cache_that_cannot_be_used_is_no_error(timed, tmp_path):
    how = {"cache": tmp_path, "budget": 1.0}
    found_with(timed, {}, small().eval(), **how)
    (file,) = tmp_path.iterdir()
    file.write_text("{")
    found = found_with(timed, {}, small().eval(), **how)
    assert not found.from_cache
    assert "the cache was not used" in found.notes[-1]
    blocked = tmp_path / "file"
    blocked.write_text("")
    found = found_with(timed, {}, small().eval(), **(how | {"cache": blocked / "folder"}))
    assert found.notes[-1].startswith("the result was not cached: ")
    assert (
        found_with(timed, {}, small().eval(), **(how | {"cache": False})).notes == found.notes[:-1]
    )


def test_it_lies_where_the_system_keeps_such_things(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert caching.default_folder() == tmp_path / "prepare" / "tune"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(sys, "platform", "linux")
    assert caching.default_folder() == tmp_path / ".cache" / "prepare" / "tune"


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0, "0 seconds ago"), (61, "1 minute ago"), (7300, "2 hours ago"), (200000, "2 days ago")],
)
def test_its_age_is_told_in_words(seconds, words):
    from datetime import datetime, timedelta

    assert (
        caching.age((datetime.now().astimezone() - timedelta(seconds=seconds)).isoformat()) == words
    )


# ------------------------------------------------------------------------------ the record


def record(**changes):
    steps = {"half": {"dtype": "bfloat16", "keep": []}}
    rows = (
        Row(name="bfloat16", steps=steps, status="winner", reason="takes 0.50 of the time", cost=4,
            seconds=0.05, ratio=0.5, ratio_interval=(0.48, 0.52), rounds=20, verified="pass", error=1e-3,
            allowed=1e-2),
        Row(name=UNPREPARED, steps={}, status="slower", reason="takes 2.00 times as long", cost=0,
            seconds=0.1, ratio=1.0, rounds=20, error=0.0),
        Row(name="[red]compile", steps={}, status="not measured", reason="no time", cost=6),
    )  # fmt: skip
    whole = {
        "rows": rows, "winner": "bfloat16", "mode": "eval", "allow": ("bfloat16",), "budget": 60.0,
        "seconds": 12.0, "rounds": 20, "noise": 1.02, "made": "2026-01-01T00:00:00+00:00",
        "from_cache": False, "conditions": {}, "environment": {}, "notes": ("mind this",),
    }  # fmt: skip
    return Tuning(**(whole | changes))


def test_a_record_comes_back_as_it_was_saved(tmp_path):
    record().save(tmp_path / "tune.json")
    assert Tuning.load(tmp_path / "tune.json") == record()


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({"format": "prepare.bench"}, "this is a prepare.bench, not a prepare.tune"),
        ({"version": 2}, "version 2 is not known here"),
        ({"winner": "nobody"}, "this is not a tuning: KeyError: 'nobody'"),
        ({"rows": [{}]}, "this is not a tuning: ValueError: the keys are"),
        ({"more": 1}, "this is not a tuning: ValueError: the keys are"),
        ({"rows": 3}, "this is not a tuning: TypeError"),
    ],
)
def test_another_file_is_told_from_a_tuning(tmp_path, change, wrong):
    path = tmp_path / "tune.json"
    record().save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(TuneError) as error:
        Tuning.load(path)
    assert wrong in str(error.value)


def test_a_status_that_does_not_exist_is_no_tuning(tmp_path):
    path = tmp_path / "tune.json"
    record().save(path)
    path.write_text(path.read_text().replace('"slower"', '"sluggish"'))
    with pytest.raises(TuneError, match="'sluggish' is not a status"):
        Tuning.load(path)


def test_the_terminal_shows_every_candidate_and_why_it_lost(capsys):
    show_tune(record(), "runs/1/tune.json")
    out = capsys.readouterr().out
    assert tune_sentence(record()) in out
    for text in ("0.480 to 0.520", "slower", "[red]compile: not measured: no time", "note: mind this",
                 "20 rounds in 12.0 s; differences below 2.0% are noise", "runs/1/tune.json"):  # fmt: skip
        assert text in out


# ------------------------------------------------------------------------------ the command line


TUNE = ("model._target_=test_tune.small", "input.shape=[2,3,12,12]", "device=cpu", "bench=none")


@pytest.fixture
def go(tmp_path, monkeypatch, capsys):
    """Runs task=tune in an empty folder, in this process; gives the folder and what was said."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")

    def run(*argv, code=0):
        own = ("task=tune", "hydra.run.dir=run", f"tune.cache={tmp_path}/kept")
        assert cli.run([*TUNE, *own, *argv]) == code
        return tmp_path / "run", capsys.readouterr()

    return run


def test_the_winner_is_applied_audited_and_recorded_like_any_other_run(timed, go):
    timed.update({"channels_last + input": 0.05})
    folder, said = go("tune.budget=5")
    found = Tuning.load(folder / "tune.json")
    assert found.winner == "channels_last + input"
    assert recipe.load(folder / "recipe.yaml") == found.recipe
    assert (
        json.loads((folder / "audit.json").read_text())["summary"]["convolutions"]["converted"] == 2
    )
    assert json.loads((folder / "verify.json").read_text())["status"] == "pass"
    assert "tune (inference): channels_last + input: takes 0.50 of the time" in said.out
    assert "Sequential is prepared: device cpu, conv2d_memory_format channels_last" in said.out
    page = (folder / "report.html").read_text()
    assert '<section id="tune"' in page
    assert all(row.name in page for row in found.rows)
    assert "Speed against error" in page
    again = Pipeline.load(folder / "recipe.yaml")
    assert again.to_config() == found.recipe
    assert not again.plan(again.apply(small().eval()))


def test_the_options_of_the_command_line_reach_the_tuning(timed, go):
    timed.update({"bfloat16": 0.03})
    folder, said = go("tune.budget=4", "tune.allow=[bfloat16]", "memfmt=contiguous")
    found = Tuning.load(folder / "tune.json")
    assert (found.winner, found.budget, found.allow) == ("bfloat16", 4.0, ("bfloat16",))
    assert found.row(AS_DECLARED).steps["conv2d_memory_format"]["memory_format"] == "contiguous"
    assert all("device" in row.steps for row in found.rows)
    assert [path.suffix for path in (folder.parent / "kept").iterdir()] == [".json"]
    _, said = go("tune.budget=4", "tune.allow=[bfloat16]", "memfmt=contiguous")
    assert "note: from the cache, and verified again: measured" in said.out
    folder, _ = go("tune.budget=1", "mode=train", "model._target_=sample_nets.Net")
    assert Tuning.load(folder / "tune.json").mode == "train"


def test_without_an_example_there_is_nothing_to_time(go):
    _, said = go("input.shape=null", code=2)
    assert "input: task=tune needs an example input; give one with input.shape=[...]" in said.err


# ------------------------------------------------------------------------------ several ranks

RANK = """
import sys
import torch
import torch.distributed as dist
from prepare import tune as module
from prepare.errors import RefusedError
from prepare.tune.session import TuningSession
from test_tune import BATCH, small

rank, file, wrong = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "wrong"
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
if rank:
    TuningSession.run = None  # only rank 0 may measure
torch.manual_seed(rank)
try:
    found = module.tune(small(), BATCH[:, :2] if wrong else BATCH, budget=0.5, cache=False)
    print(found.winner, found.seconds, sorted(found.recipe))
except Exception as error:
    print(type(error).__name__, error)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("how", ["right", pytest.param("wrong", marks=pytest.mark.slow)])
def test_rank_0_decides_and_all_follow(tmp_path, how):
    command = [sys.executable, "-c", RANK]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store"), how], stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": f"{Path(__file__).parent}{os.pathsep}{PYTHONPATH}"},
        )
        for rank in (0, 1)
    ]  # fmt: skip
    said = [rank.communicate(timeout=120) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    first, second = (out for out, _ in said)
    if how == "right":
        assert first == second != ""
    else:
        assert first.startswith("ModelError the unprepared model: forward of 0")
        assert second.startswith("RefusedError rank 0: the unprepared model: forward of 0")


# ------------------------------------------------------------------------------ in earnest


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_in_earnest_it_finds_something_that_is_right(mode):
    found = tune(small(), BATCH, mode=mode, allow=["bfloat16"], budget=3.0, cache=False)
    assert found.rows[0].status == "winner"
    assert found.rows[0].verified in (["", "pass"] if found.winner == UNPREPARED else ["pass"])
    model = found.pipeline.apply(small().train(mode == "train"))
    assert model(BATCH).shape == (2, 4, 8, 8)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["eval", "train"])
def test_in_earnest_compilers_take_part(mode):
    found = tune(small(), BATCH, mode=mode, allow=["compile"], budget=60.0, cache=False)
    compiled = [row for row in found.rows if "compile" in row.steps and row.rounds]
    assert compiled
    assert {row.status for row in compiled} <= {"winner", "slower", "not faster"}
