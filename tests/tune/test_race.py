"""The race of a tuning, on a simulated clock: winners, eliminations, budget, verifications, compilers."""

import random
import re
from collections import Counter

import pytest

from prepare.stages.tune.compare_candidates import CandidateError
from prepare.stages.tune.records import UNPREPARED
from simulated_race import FAIL, UNSURE, ScriptedRunner, SimulatedRace


def test_the_fastest_recipe_wins_and_every_loser_has_a_reason():
    simulated = SimulatedRace({UNPREPARED: 0.1, "quick": 0.08, "slow": 0.0825, "equal": 0.1}).run()
    assert simulated.winner.name == "quick"
    assert simulated.winner.reason.startswith("1.25x faster (1.2")
    slow = simulated.by_name["slow"]
    assert (slow.status, slow.runner) == ("slower", None)
    assert re.fullmatch(r"1\.0\dx slower \(1\.0\dx to 1\.0\dx\) than quick", slow.reason)
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


@quick_and_full((8, 7), (100, 95))
def test_no_recipe_wins_by_luck_on_a_shared_machine(monkeypatch, races, least):
    def shared(mean, spread, seed):
        order = random.Random(seed)
        return lambda: mean * order.choice([1, 4])

    monkeypatch.setitem(globals(), "noisy", shared)
    times = dict.fromkeys((UNPREPARED, *"abcdefghij"), 0.1)
    won = [SimulatedRace(times, seed=seed, budget=20.0).run().winner.name for seed in range(races)]
    assert won.count(UNPREPARED) >= least


@quick_and_full((8, 7), (100, 95))
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
        rf"[\d.]+x (slower|faster)( \(.*\))? than {winner}(, which is simpler)?$", loser.reason
    )


@pytest.mark.slow
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
    assert base.reason.endswith("x) than sure")
    assert simulated.checked == ["sure", "wild"]
    simulated.race._disqualify(wild, "failed", "no more")  # so no running recipe is proven faster
    assert [(each.name, each.status) for each in simulated.race.contestants] == [
        (UNPREPARED, ""), ("sure", ""), ("wild", "failed")]  # fmt: skip
    assert simulated.race.standings.live() == [base]


def test_the_unprepared_model_comes_back_by_later_rounds():
    simulated = SimulatedRace({UNPREPARED: 1.0, "early": 1.05})
    race, (base, early) = simulated.race, simulated.race.contestants
    for each in (base, race.standings.control, early):
        each.runner = ScriptedRunner(simulated.clock, lambda: 1.0)
    for number in range(60):
        first = number < 8
        base.times[number] = race.standings.control.times[number] = 1.7 if first else 1.0
        early.times[number] = 1.05
        if number == 7:
            race._eliminate_slower()
            assert base.status == "slower"
    assert race._conclude() is base
    assert (early.status, early.reason.partition(" ")[0]) == ("slower", "1.05x")


def test_a_winner_is_always_faster_by_its_last_interval():
    simulated = SimulatedRace({UNPREPARED: 1.0, "sure": 0.9, "simple": 0.91}, steps=RICHER)
    standings = simulated.race.standings
    base, sure, simple = simulated.race.contestants
    for each in (base, standings.control, sure, simple):
        each.runner = ScriptedRunner(simulated.clock, lambda: 1.0)
    for number in range(40):
        base.times[number] = standings.control.times[number] = 1.0
        sure.times[number] = 0.9
        simple.times[number] = 0.905 if number % 10 < 6 else 1.1  # its interval has 1 in it
    base.status = "slower"
    assert standings.simplest() is sure
    sure.status = "wrong"
    assert standings.simplest() is base


@pytest.mark.parametrize("slow", ["repair", UNPREPARED])
def test_a_recipe_that_was_slow_in_early_rounds_comes_back(slow):
    times = {UNPREPARED: 1.0, "layout": 0.84, "repair": 0.68}
    simulated = SimulatedRace(times, spread=0.03, budget=900.0, slow_first={slow: (1.7, 8)}).run()
    assert simulated.winner.name == "repair"
    assert simulated.by_name[UNPREPARED].reason.startswith("1.")
    assert (simulated.by_name["repair"].since > 0) == (slow == "repair")


def disturbed_race(seed):
    """A race on a machine with short bursts, where some candidates are slow in their first rounds."""
    draw = random.Random(f"disturbed {seed}")
    own = {
        name: draw.choice([0.6, 0.7, 0.8, 0.9, 0.97, 1.0, 1.05, 1.1, 1.3]) for name in "abcdefgh"
    }
    means = [
        {"a": 1.05, "b": 1.06, "c": 1.12},
        {"layout": 0.84, "repair": 0.68, "a": 0.95, "b": 1.3},
        {name: own[name] for name in "abcdefgh"[: draw.randint(2, 8)]},
    ][seed % 3]
    means = {UNPREPARED: 1.0} | means
    bursts = draw.choice([(0.06, 0.02, 4.0), (0.03, 0.03, 3.0), (0.2, 0.05, 8.0)])
    return SimulatedRace(
        {name: 0.02 * mean for name, mean in means.items()},
        budget=draw.choice([6.0, 12.0, 24.0]),
        spread=draw.choice([0.02, 0.05, 0.1]),
        starts=dict.fromkeys(means, 0.1),
        checking=0.3,
        disturbed=dict(zip(("quiet", "busy", "most"), bursts, strict=True)),
        slow_first={
            name: (draw.uniform(1.15, 1.8), draw.randint(6, 20))
            for name in means
            if draw.random() < 0.2
        },
        seed=seed,
    )


@quick_and_full((24, 22), (600, 552))
def test_no_disturbed_tuning_crowns_a_slower_recipe(races, least):
    right = 0
    for seed in range(races):
        simulated = disturbed_race(seed).run()
        standings, winner, means = simulated.race.standings, simulated.winner, simulated.means
        if winner is not standings.base:
            assert standings.final_ratio(winner, winner).interval[1] < 1, seed
            assert means[winner.name] < means[UNPREPARED], seed
        right += means[winner.name] <= 1.03 * min(means.values())
    assert right >= least


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
        r"1\dx slower \(1\dx to 1\dx\) than unprepared",
        simulated.by_name["awful"].reason,
    )


def test_a_difference_of_20_percent_is_found_with_slow_calls():
    times = {UNPREPARED: 2.0, "quick": 1.6} | {f"slow {n}": 2.4 for n in range(5)}
    won = [SimulatedRace(times, spread=0.02, seed=seed).run().winner for seed in range(40)]
    assert all(each.name == "quick" for each in won)


@quick_and_full((6, 5), (60, 56))
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


def test_a_recipe_that_fails_verification_eliminates_no_other():
    times = {UNPREPARED: 0.1, "wrong": 0.02, "unsure": 0.04, "right": 0.08}
    simulated = SimulatedRace(times, checks={"wrong": FAIL, "unsure": UNSURE}).run()
    assert simulated.winner.name == "right"
    assert simulated.checked == ["wrong", "unsure", "right"]
    assert simulated.by_name["wrong"].status == "wrong"
    assert simulated.by_name["wrong"].reason == "its verification failed: outputs: off"
    assert simulated.by_name["unsure"].status == "cannot tell"
    assert simulated.by_name["unsure"].reason == "it could not be verified: there is no time"


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
    simulated = [
        SimulatedRace({UNPREPARED: 1.0} | times, checks=checks, seed=seed, **LONG_CHECKS).run()
        for seed in range(40)
    ]
    assert sum(race.winner.name in good for race in simulated) >= races
    assert max(race.clock.now for race in simulated) < 1.5 * 60 + 12 + 5


def test_a_recipe_restored_too_late_says_so():
    simulated = SimulatedRace({UNPREPARED: 1.0, "wrong": 0.5, "right": 0.6}, checks={"wrong": FAIL})
    race, (base, wrong, right) = simulated.race, simulated.race.contestants
    for each, seconds in ((base, 1.0), (race.standings.control, 1.0), (wrong, 0.5), (right, 0.6)):
        each.runner = ScriptedRunner(simulated.clock, lambda: 1.0)
        each.times.update(dict.fromkeys(range(3), seconds))
    race._eliminate(right, "slower", "takes 1.20 times as long as wrong", wrong)
    assert race._conclude() is base
    assert [each.status for each in race.contestants] == ["winner", "wrong", "not measured"]
    late = "no time was left to try it again, after the recipe that had eliminated it was dropped"
    assert right.reason == late


def test_the_unprepared_model_wins_if_no_recipe_is_correct():
    simulated = SimulatedRace(
        {UNPREPARED: 0.1, "a": 0.05, "b": 0.06}, checks={"a": FAIL, "b": FAIL}
    ).run()
    assert simulated.winner.name == UNPREPARED
    assert simulated.winner.reason == "no recipe was shown to be correct and faster"


def test_a_recipe_that_fails_is_dropped_and_the_others_continue():
    simulated = SimulatedRace(
        {UNPREPARED: 0.1, "never": 0.05, "later": 0.05, "quick": 0.08},
        starts={"never": "avg_pool3d: not implemented for bfloat16"},
        breaks={"later": 8},
    ).run()
    assert simulated.winner.name == "quick"
    assert simulated.by_name["never"].reason == "avg_pool3d: not implemented for bfloat16"
    assert simulated.by_name["later"].status == simulated.by_name["never"].status == "failed"


def test_there_is_a_winner_even_if_the_leader_fails_late():
    simulated = SimulatedRace(
        {UNPREPARED: 0.1, "quick": 0.05}, breaks={"quick": 14}, budget=5.0
    ).run()
    assert simulated.winner.name == UNPREPARED
    assert simulated.by_name["quick"].reason == "no more"


COMPILING = {name: {"compile": {}, **more} for name, more in {
    "plain": {}, "slow one": {"slow": {}}, "quick one": {"quick": {}}}.items()}  # fmt: skip


def test_compilers_run_last_the_most_promising_first():
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
    simulated = SimulatedRace(times, steps=steps, starts=starts, budget=60.0).run()
    assert simulated.winner.name == "quick one"
    assert min(simulated.by_name["quick one"].times) > max(simulated.by_name["slow"].times)
    assert min(simulated.by_name["quick one"].times) < min(simulated.by_name["plain"].times)


def test_each_compiler_is_tried_once_then_the_fastest_on_the_rest():
    good, bad = {"backend": "good"}, {"backend": "bad"}
    quick = {"quick": {}}
    steps = {"quick": quick, "bad": {"compile": bad}, "good": {"compile": good}}
    steps |= {"quick + bad": {**quick, "compile": bad}, "quick + good": {**quick, "compile": good}}
    times = {UNPREPARED: 0.1, "quick": 0.08, "bad": 0.1, "good": 0.07}
    times |= {"quick + bad": 0.09, "quick + good": 0.06}
    simulated = SimulatedRace(
        times, steps=steps, starts=dict.fromkeys(steps, 5.0), budget=80.0
    ).run()
    begun = [
        min(simulated.by_name[name].times)
        for name in ("quick + bad", "quick + good", "good", "bad")
    ]
    assert begun == sorted(set(begun))
    assert simulated.winner.name == "quick + good"


@pytest.mark.parametrize(("cast", "first"), [(0.05, "cast + a"), (0.09, "b")])
def test_compilers_are_tried_first_in_the_fastest_precision(cast, first):
    a, b, half = {"compile": {"backend": "a"}}, {"compile": {"backend": "b"}}, {"half": {}}
    steps = {"cast": half, "quick": {"quick": {}}, "cast + a": half | a, "cast + b": half | b}
    steps |= {"b": {"quick": {}} | b, "a": {"quick": {}} | a}
    times = {UNPREPARED: 0.1, "cast": cast, "quick": 0.07}
    times |= dict.fromkeys(("cast + a", "cast + b", "b", "a"), 0.04)
    simulated = SimulatedRace(
        times, steps=steps, starts=dict.fromkeys(steps, 5.0), budget=60.0
    ).run()
    compiled = [simulated.by_name[name] for name in ("cast + a", "cast + b", "a", "b")]
    begun = {each.name: min(each.times) for each in compiled if each.times}
    assert min(begun, key=begun.get) == first


def test_each_precision_is_tried_before_a_long_compilation():
    cast = {"half": {"dtype": "bfloat16"}}
    steps = {f"cast {n}": {**cast, f"{n}": {}} for n in range(3)} | {"plain": {"compile": {}}}
    times = {UNPREPARED: 3.0} | dict.fromkeys(steps, 2.0) | {"quick": 1.5}
    simulated = SimulatedRace(times, steps=steps, starts={"plain": 200.0}, budget=70.0).run()
    assert simulated.winner.name == "quick"
    begun = [min(simulated.by_name[name].times) for name in ("cast 0", "quick", "plain", "cast 2")]
    assert begun == sorted(begun)
    assert begun[1] < begun[2]


def test_with_time_for_two_recipes_each_precision_has_one():
    cast = {"half": {"dtype": "bfloat16"}}
    steps = {f"cast {n}": {**cast, f"{n}": {}} for n in range(3)}
    times = {UNPREPARED: 3.0} | dict.fromkeys(steps, 2.5) | {"quick": 1.5}
    simulated = SimulatedRace(times, steps=steps, budget=44.0, spread=0.05).run()
    assert simulated.winner.name == "quick"
    assert min(simulated.by_name["quick"].times) == min(simulated.by_name["cast 0"].times) == 0


def test_a_compilation_that_does_not_fit_is_not_started():
    times = {UNPREPARED: 0.1, "plain": 0.05, "quick one": 0.05}
    simulated = SimulatedRace(
        times, steps=COMPILING, starts=dict.fromkeys(COMPILING, 40.0), budget=60.0
    ).run()
    assert sorted(each.status for each in simulated.race.contestants) == [
        "not measured",
        "slower",
        "winner",
    ]
    assert simulated.clock.now < 66


def test_a_recipe_compiled_beyond_the_budget_is_still_timed():
    times = {UNPREPARED: 0.1, "plain": 0.08}
    simulated = SimulatedRace(times, steps=COMPILING, starts={"plain": 500.0}, budget=60.0).run()
    assert simulated.winner.name == "plain"
    assert 6 <= len(simulated.by_name["plain"].times) <= 20


def test_a_compiled_recipe_is_timed_despite_a_long_verification():
    times = {UNPREPARED: 0.1, "other": 0.1, "plain": 0.06}
    simulated = SimulatedRace(times, steps=COMPILING, starts={"plain": 500.0}, checking=60.0).run()
    assert (simulated.winner.name, simulated.checked) == ("plain", ["plain"])
    assert 6 <= len(simulated.by_name["plain"].times) <= 20
