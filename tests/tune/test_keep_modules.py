"""Modules in float32: the error of each in 16 bits, the search for the fewest, and the recipe that keeps them."""

import copy
import math

import pytest
import torch
from torch import nn

from prepare.errors import ModelError
from prepare.pipeline import Pipeline
from prepare.stages.tune.candidates import Candidate
from prepare.stages.tune.compare_candidates import CandidateError, CheckResult
from prepare.stages.tune.keep_modules import (
    KeepInFloat32,
    ModuleError,
    keeping,
    measure_modules,
    worth_keeping,
)
from prepare.stages.tune.records import KeptModule
from simulated_race import FAIL, UNPREPARED, SimulatedRace
from tune_checks import LOUD, Attempts, Energy, Net, Offset, seeded


def errors_of(model, batch, dtype, mode="eval"):
    low = Pipeline.from_config({"half": {"dtype": dtype}}).apply(copy.deepcopy(model))
    return measure_modules(copy.deepcopy(model), low, batch, dtype=getattr(torch, dtype), mode=mode)


def test_a_module_that_overflows_has_an_infinite_error():
    errors = errors_of(seeded(Net, Energy()), LOUD, "float16")
    assert errors.keys() == {"first", "middle", "last"}
    assert errors["middle"].low == math.inf
    assert errors["middle"].kept < 1e-3
    assert worth_keeping(errors)[0] == "middle"


def test_a_module_that_loses_digits_has_a_large_error():
    class Shifts(Net):
        def forward(self, x):
            return self.last(self.middle(self.first(x), by={"large": 1000.0}))

    errors = errors_of(seeded(Shifts, Offset()), LOUD / 1000, "bfloat16")
    assert errors["middle"].low > 0.5
    assert errors["middle"].kept < 0.01
    assert worth_keeping(errors)[0] == "middle"


def test_a_container_is_kept_if_results_inside_do_not_fit():
    class Scale(nn.Module):
        def __init__(self, by):
            super().__init__()
            self.by = by

        def forward(self, x):
            return x * self.by

    model = seeded(Net, nn.Sequential(Scale(1e4), Scale(1e-4)))
    errors = errors_of(model, LOUD, "float16")
    assert errors["middle.0"].kept == errors["middle.0"].low == math.inf
    assert worth_keeping(errors)[0] == "middle"


def test_a_container_is_kept_last_for_the_error_of_one_module_in_it():
    errors = {
        "block": ModuleError(0.5, 0.001),
        "block.bad": ModuleError(0.4, 0.001),
        "block.good": ModuleError(0.003, 0.002),
        "other": ModuleError(0.9, 0.85),
        "many": ModuleError(0.02, 0.002),
        "many.a": ModuleError(0.009, 0.002),
        "many.b": ModuleError(0.008, 0.002),
    }
    order = ["block.bad", "many", "many.a", "many.b", "block.good", "block"]
    assert worth_keeping(errors) == order


def test_modules_inside_a_kept_one_are_not_named():
    attempts = Attempts(["a"])
    search = attempts.search(["a.b", "a.c", "a"])
    assert search.modules == ("a",)
    assert attempts.tried == ["a.b", "a.ba.c", "a"]


def test_dropout_is_not_an_error():
    model = seeded(Net, nn.Dropout(0.5)).train()
    assert errors_of(model, LOUD / 1000, "bfloat16", "train")["middle"].low < 0.01


@pytest.mark.parametrize(
    ("enough", "found", "tried"),
    [
        ("a", "a", ["a"]),
        ("c", "c", ["a", "ab", "abcd", "abc", "ac", "c"]),
        ("bd", "bd", ["a", "ab", "abcd", "abc", "abd", "ad", "bd"]),
        ("abcdefg", "abcdefg", None),
    ],
)
def test_the_fewest_modules_are_kept_the_largest_error_first(enough, found, tried):
    attempts = Attempts(enough)
    search = attempts.search("abcdefg")
    assert "".join(search.modules) == found
    assert search.checked.status == "pass"
    assert search.is_complete
    assert tried in (None, attempts.tried)


def test_a_search_that_finds_nothing_says_so():
    for order in ("", "a", "abc"):
        search = Attempts().search(order)
        assert search.modules is None
        assert search.is_complete


@pytest.mark.parametrize(("most", "found"), [(0, None), (2, None), (3, "abcd"), (4, "abc")])
def test_a_search_ends_with_its_time_and_keeps_the_best_so_far(most, found):
    attempts = Attempts("c", most=most)
    search = attempts.search("abcdefg")
    assert search.modules == (found and tuple(found))
    assert not search.is_complete


HALF = {"half": {"dtype": "float16", "keep": "norms"}}


def test_a_recipe_keeps_modules_by_their_exact_names():
    recipe = keeping(Candidate("half", HALF), ("a[0]", "norms"))
    assert recipe.steps["half"]["keep"] == ["norms", "a[[]0]", "[n]orms"]
    assert recipe.name == "half + float32 in 2 modules"
    assert keeping(Candidate("half", HALF), ("head",)).name == "half + float32 head"
    assert recipe.cost == Candidate("half", HALF).cost + 1


class Stub:
    """A candidate that runs; its calls take as long as it keeps modules."""

    seconds, first_seconds = 0.0, 0.0

    def __init__(self, candidate):
        self.kept = len(candidate.steps["half"]["keep"]) if "float32" in candidate.name else 1

    def turn(self, number):
        return 1.0 + self.kept


class Corrections:
    """A KeepInFloat32 whose recipes pass if they keep `needed`; on a clock that only attempts advance."""

    def __init__(self, needed, *, takes=1.0):
        self.now, self.attempts, self.measured, self.takes = 0.0, 0, 0, takes
        self.needed, self.stages = needed, []
        self.correct = KeepInFloat32(
            self.measure, Stub, self.check, lambda: self.now, lambda s: Stage(self.stages, s)
        )

    def measure(self, candidate):
        self.measured += 1
        return {name: ModuleError(low, 0.001) for name, low in (("a", math.inf), ("b", 0.5))}

    def check(self, candidate, runner):
        self.attempts, self.now = self.attempts + 1, self.now + self.takes
        passes = self.needed in candidate.steps["half"]["keep"]
        return CheckResult("pass" if passes else "fail")


class Stage:
    def __init__(self, stages, text):
        stages.append(text)

    def __enter__(self):
        return self

    def __exit__(self, *raised):
        return None


def test_the_corrected_recipe_says_what_each_module_costs():
    corrections = Corrections("a")
    found = corrections.correct(Candidate("half", HALF), 100.0)
    assert found.candidate.steps["half"]["keep"] == ["norms", "a"]
    assert found.kept == (KeptModule("a", None, 0.001, 1.5),)
    assert found.checked.status == "pass"
    assert found.reason == "it is right with a in float32"
    assert corrections.stages == [
        "measuring the error of each module in float16",
        "verifying half + float32 a",
        "timing what a costs in float32",
    ]


def test_one_search_serves_all_recipes_of_a_dtype():
    corrections = Corrections("a")
    corrections.correct(Candidate("half", HALF), 100.0)
    other = Candidate("half + input", {**HALF, "input_format": {}})
    found = corrections.correct(other, 100.0)
    assert (found.candidate.name, found.checked) == ("half + input + float32 a", None)
    assert corrections.measured == 1
    assert corrections.correct(Candidate("channels_last", {}), 100.0) is None


def test_a_search_says_if_no_set_or_no_time_is_left():
    corrections = Corrections("neither")
    found = corrections.correct(Candidate("half", HALF), 100.0)
    assert (found.candidate, found.kept) == (None, ())
    assert found.reason == "no set of modules in float32 makes it right"
    assert corrections.attempts == 2
    for seconds in (0.0, 2.0):
        corrections = Corrections("b", takes=10.0)
        found = corrections.correct(Candidate("half", HALF), seconds)
        assert corrections.attempts <= 1
        assert found.reason == ("no time was left to find the modules that have to stay in float32")


def test_a_recipe_with_kept_modules_that_cannot_run_is_no_solution():
    def start(candidate):
        raise CandidateError("no kernel")

    corrections = Corrections("a")
    corrections.correct.start = start
    assert corrections.correct(Candidate("half", HALF), 100.0).candidate is None


def test_a_race_enters_the_corrected_recipe_verified_once():
    race = SimulatedRace(
        {UNPREPARED: 0.1, "half": 0.05, "half + float32 a": 0.06},
        steps={"half": HALF},
        checks={"half": FAIL},
    )
    race.race.contestants.pop()  # it is entered by the search alone
    race.race._corrector = Corrections("a").correct
    race.run()
    assert race.winner.name == "half + float32 a"
    assert race.by_name["half"].reason.endswith("; it is right with a in float32")
    assert race.checked == ["half"]


def test_a_race_goes_on_if_modules_cannot_be_measured():
    def measure(candidate):
        raise ModelError("forward of Net", "no")

    race = SimulatedRace(
        {UNPREPARED: 0.1, "half": 0.05}, steps={"half": HALF}, checks={"half": FAIL}
    )
    corrections = Corrections("a")
    corrections.correct.measure = measure
    race.race._corrector = corrections.correct
    race.run()
    assert race.winner.name == UNPREPARED
    reason = race.by_name["half"].reason
    assert reason.endswith("; its modules cannot be measured: forward of Net: no")
