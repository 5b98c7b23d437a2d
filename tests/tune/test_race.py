"""The race of a tuning, on a simulated clock: winners, eliminations and budget."""

import random
import re
from collections import Counter

import pytest

from prepare.tune.compare_candidates import CandidateError
from prepare.tune.records import UNPREPARED
from simulated_race import FAIL, UNSURE, ScriptedRunner, SimulatedRace


def test_the_fastest_recipe_wins_and_every_loser_has_a_reason():
    simulated = SimulatedRace({UNPREPARED: 0.1, "quick": 0.08, "slow": 0.0825, "equal": 0.1}).run()
    assert simulated.winner.name == "quick"
    assert simulated.winner.reason.startswith("takes 0.80 of the time of the unprepared model (0.7")
    slow = simulated.by_name["slow"]
    assert (slow.status, slow.runner) == ("slower", None)
    assert slow.reason.startswith("takes 1.0")
    assert "times as long as quick (1.0" in slow.reason
    assert simulated.by_name[UNPREPARED].status == simulated.by_name["equal"].status == "slower"
    assert simulated.checked == ["quick"]


def quick_and_full(*counts):
    """Run a test with few races in the quick tier and with all of them in the slow one."""
    quick, full = counts
    return pytest.mark.parametrize(
        ("races", "least"),
        [quick, pytest.param(*full, marks=pytest.mark.slow)],
        ids=["few", "many"],
    )


@quick_and_full((30, 28), (100, 93))
def test_the_unprepared_model_wins_among_equals(races, least):
    won = [
        SimulatedRace(
            dict.fromkeys((UNPREPARED, "a", "b", "c"), 0.1), spread=0.05, seed=seed, budget=20.0
        )
        .run()
        .winner
        for seed in range(races)
    ]
    assert sum(each.name == UNPREPARED for each in won) >= least


def test_no_recipe_wins_by_luck_on_a_shared_machine(monkeypatch):
    def shared(mean, spread, seed):
        order = random.Random(seed)
        return lambda: mean * order.choice([1, 4])

    monkeypatch.setitem(globals(), "noisy", shared)
    times = dict.fromkeys((UNPREPARED, *"abcdefghij"), 0.1)
    won = [SimulatedRace(times, seed=seed, budget=20.0).run().winner.name for seed in range(40)]
    assert won.count(UNPREPARED) >= 38


@quick_and_full((20, 19), (100, 95))
def test_a_recipe_that_is_ten_percent_faster_wins(races, least):
    times = {UNPREPARED: 0.1, "a": 0.1, "tenth": 0.09}
    won = [SimulatedRace(times, spread=0.05, seed=seed).run().winner.name for seed in range(races)]
    assert won.count("tenth") >= least


RICHER = {"rich": {"some_step": {}, "half": {}}, "simple": {"conv2d_memory_format": {}}}


@pytest.mark.parametrize(("rich", "winner"), [(0.08, "simple"), (0.0792, "simple"), (0.07, "rich")])
def test_a_richer_recipe_wins_only_if_faster_by_over_two_percent(rich, winner):
    times = {UNPREPARED: 0.1, "rich": rich, "simple": 0.08}
    races = [
        SimulatedRace(times, steps=RICHER, spread=0.005, seed=seed).run() for seed in range(40)
    ]
    assert Counter(race.winner.name for race in races)[winner] >= 38
    loser = races[0].by_name["simple" if winner == "rich" else "rich"]
    assert re.match(
        rf"takes \d\.\d\d times as long as {winner}(, which is simpler| \()", loser.reason
    )


def test_the_faster_of_two_recipes_needs_no_proof():
    times = {UNPREPARED: 1.0, "simple": 0.9, "rich": 0.8, **dict.fromkeys("abcdef", 0.9)}
    races = [
        SimulatedRace(times, steps=RICHER, spread=0.1, seed=s, budget=150.0).run()
        for s in range(40)
    ]
    assert Counter(race.winner.name for race in races)["rich"] >= 34


def test_only_a_significantly_faster_recipe_eliminates_the_baseline():
    simulated = SimulatedRace({UNPREPARED: 1.0, "sure": 0.9, "wild": 0.8})
    base, sure, wild = simulated.race.contestants
    for each in (base, sure, wild):
        each.runner = ScriptedRunner(simulated.clock, lambda: 1.0)
    for number in range(20):
        base.times[number] = simulated.race.standings.control.times[number] = 1.0
        sure.times[number] = 0.9
        wild.times[number] = 0.8 if number % 10 < 7 else 1.5
    assert not simulated.race.standings.is_better(wild)
    simulated.race._eliminate_slower()
    assert [(each.name, each.status) for each in simulated.race.contestants] == [
        (UNPREPARED, "slower"), ("sure", "slower"), ("wild", "")]  # fmt: skip
    assert base.reason.startswith("takes 1.11 times as long as sure")
    assert simulated.checked == ["sure", "wild"]
    simulated.race._disqualify(wild, "failed", "no more")  # so no running recipe is proven faster
    assert [(each.name, each.status) for each in simulated.race.contestants] == [
        (UNPREPARED, ""), ("sure", ""), ("wild", "failed")]  # fmt: skip
    assert simulated.race.standings.live() == [base]


def test_an_eliminated_recipe_has_its_ratio_through_the_winner():
    simulated = SimulatedRace({UNPREPARED: 1.0, "winner": 0.8, "early": 0.9})
    base, winner, early = simulated.race.contestants
    for number in range(30):
        base.times[number] = simulated.race.standings.control.times[number] = (
            2.0 if number < 3 else 1.0
        )
        winner.times[number] = 0.8
    early.times.update(dict.fromkeys(range(3), 0.9))
    assert simulated.race.standings.ratio(early).value == pytest.approx(0.45)
    assert simulated.race.standings.final_ratio(early, winner).value == pytest.approx(0.9)
    assert simulated.race.standings.final_ratio(winner, winner) == simulated.race.standings.ratio(
        winner
    )
    assert simulated.race.standings.final_ratio(early, base) == simulated.race.standings.ratio(
        early
    )


@pytest.mark.parametrize("how", ["starts", "breaks"])
def test_a_race_needs_an_unprepared_model_that_runs(how):
    simulated = SimulatedRace(
        {UNPREPARED: 0.1, "a": 0.1}, **{how: {UNPREPARED: "no" if how == "starts" else 4}}
    )
    with pytest.raises(CandidateError, match="no"):
        simulated.run()


def test_a_much_slower_recipe_is_eliminated_after_three_rounds():
    simulated = SimulatedRace({UNPREPARED: 0.1, "awful": 1.5}).run()
    assert len(simulated.by_name["awful"].times) == 3
    assert re.fullmatch(
        r"takes 1\d\.\d\d times as long as unprepared \(1\d\.\d\d to 1\d\.\d\d\)",
        simulated.by_name["awful"].reason,
    )


def test_a_difference_of_20_percent_is_found_with_slow_calls():
    times = {UNPREPARED: 2.0, "quick": 1.6} | {f"slow {n}": 2.4 for n in range(5)}
    won = [SimulatedRace(times, spread=0.02, seed=seed).run().winner for seed in range(40)]
    assert all(each.name == "quick" for each in won)


@quick_and_full((15, 14), (60, 56))
def test_few_rounds_do_not_make_a_winner_among_equals(races, least):
    times = dict.fromkeys((UNPREPARED, *"abcdefghij"), 1.0)
    for rounds in (3, 6, 9, 15):
        budget = 12.0 * rounds + 12
        won = [
            SimulatedRace(times, spread=0.05, seed=seed, budget=budget).run().winner.name
            for seed in range(races)
        ]
        assert won.count(UNPREPARED) >= least, rounds


def test_a_race_ends_when_it_is_clear_or_the_budget_is_spent():
    clear = SimulatedRace({UNPREPARED: 0.1, "quick": 0.08}, spread=0.01).run()
    assert clear.clock.now < 20
    unclear = SimulatedRace({UNPREPARED: 0.1, "same": 0.1}, spread=0.4, budget=20.0).run()
    assert 19 < unclear.clock.now < 21


def test_a_recipe_without_time_left_is_not_measured():
    times = {UNPREPARED: 2.0} | {f"recipe {n}": 2.0 for n in range(9)}
    simulated = SimulatedRace(times, budget=60.0).run()
    late = [each for each in simulated.race.contestants if each.status == "not measured"]
    assert 0 < len(late) < 9
    assert late[0].reason == "no time was left to try it"
    assert simulated.clock.now <= 80


def test_with_a_tiny_budget_the_unprepared_model_wins():
    simulated = SimulatedRace({UNPREPARED: 1.0, "a": 0.1}, budget=0.01).run()
    assert (simulated.winner.name, simulated.checked) == (UNPREPARED, [])


def test_at_most_capacity_copies_run_at_a_time():
    times = {UNPREPARED: 0.1} | {f"recipe {n}": 0.1 - 0.01 * n for n in range(7)}
    simulated = SimulatedRace(times, capacity=3).run()
    assert simulated.most == 3
    assert simulated.winner.name == "recipe 6"


def test_the_same_seed_gives_the_same_race():
    times = {UNPREPARED: 0.1, "a": 0.1, "b": 0.095}
    one, same = (SimulatedRace(times, spread=0.1, seed=3).run() for _ in "ab")
    assert [each.times for each in one.race.contestants] == [
        each.times for each in same.race.contestants
    ]


def any_race(seed):
    """A random race: some candidates are wrong, fail, do not start, or compile."""
    draw = random.Random(seed)
    names = "abcdefgh"[: draw.randint(1, 8)]

    def some(part, value):
        return {name: value() for name in names if draw.random() < part}

    return SimulatedRace(
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
def test_every_race_has_one_verified_winner_and_a_status_for_all(seeds):
    won = Counter()
    for seed in seeds:
        simulated = any_race(seed).run()
        statuses = [each.status for each in simulated.race.contestants]
        assert statuses.count("winner") == 1, seed
        assert all(statuses), seed
        is_base = simulated.winner.name == UNPREPARED
        assert is_base or simulated.winner.checked.status == "pass", seed
        won[is_base] += 1
    assert min(won.values()) > len(seeds) / 10
