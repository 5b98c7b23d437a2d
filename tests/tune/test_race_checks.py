"""Verification in the race of a tuning: recipes that fail it, and the time that it takes."""

import pytest

from prepare.tune.records import UNPREPARED
from simulated_race import FAIL, UNSURE, ScriptedRunner, SimulatedRace


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
