"""Compilers in the race of a tuning: when they are tried, and when not."""

import pytest

from prepare.tune.records import UNPREPARED
from simulated_race import SimulatedRace

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
