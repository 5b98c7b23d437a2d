"""Modules that a tuning keeps in float32: their errors, the search for the fewest, and its outcome."""

import copy
import dataclasses
import math
from pathlib import Path

import pytest
import torch
from test_tune_record import record
from torch import nn

from prepare import recipe
from prepare.cli import main as cli
from prepare.errors import ModelError, PrepareError
from prepare.pipeline import Pipeline
from prepare.report.kept_modules import kept_rows
from prepare.report.pages.tune_section import tuned
from prepare.report.terminal.tune import show_tune
from prepare.tune import Tuning, keep_in_float32, session, tune
from prepare.tune.candidate_run import PreparedCandidate
from prepare.tune.candidates import Candidate
from prepare.tune.contestants import CandidateError, CheckResult
from prepare.tune.keep_modules import KeepInFloat32, keeping
from prepare.tune.keep_search import KeepSearch
from prepare.tune.module_errors import ModuleError, measure_modules, worth_keeping
from prepare.tune.records import KeptModule
from simulated_race import FAIL, UNPREPARED, SimulatedRace

# ------------------------------------------------------------------------------ the search


class Attempts:
    """Passes if the kept modules include one of the sets in `enough`; records every attempt."""

    def __init__(self, *enough, most=1000):
        self.enough, self.tried, self.most = [set(each) for each in enough], [], most

    def __call__(self, modules):
        self.tried.append("".join(modules))
        passes = any(each <= set(modules) for each in self.enough)
        return CheckResult("pass" if passes else "fail")

    def search(self, order):
        return KeepSearch(order, self, lambda: len(self.tried) < self.most).run()


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
    assert search.attempts == len(attempts.tried)
    assert tried in (None, attempts.tried)


def test_a_search_that_finds_nothing_says_so():
    for order in ("", "a", "abc"):
        search = Attempts().search(order)
        assert search.modules is None
        assert search.is_complete


@pytest.mark.parametrize(("most", "found"), [(0, None), (2, None), (3, "abcd"), (4, "abc")])
def test_a_search_ends_with_its_time_and_keeps_the_best_so_far(most, found):
    search = Attempts("c", most=most).search("abcdefg")
    assert search.modules == (found and tuple(found))
    assert not search.is_complete
    assert search.attempts == most


# ------------------------------------------------------------------------------ the error of a module


class Energy(nn.Module):
    """Overflows float16 inside, though its result fits."""

    def forward(self, x):
        return (x.square() + 1).sqrt()


class Offset(nn.Module):
    """Loses all digits of a small number in bfloat16."""

    def forward(self, x, *, by):
        return (x + by["large"]) - by["large"]


class Net(nn.Module):
    def __init__(self, middle):
        super().__init__()
        self.first, self.middle, self.last = nn.Conv2d(3, 8, 3), middle, nn.Conv2d(8, 4, 1)

    def forward(self, x):
        return self.last(self.middle(self.first(x)))


def errors_of(model, batch, dtype, mode="eval"):
    low = Pipeline.from_config({"half": {"dtype": dtype}}).apply(copy.deepcopy(model))
    return measure_modules(copy.deepcopy(model), low, batch, dtype=getattr(torch, dtype), mode=mode)


def seeded(make, *args):
    torch.manual_seed(0)
    return make(*args).eval()


LOUD = 1000 * torch.linspace(-1, 1, 2 * 3 * 12 * 12).view(2, 3, 12, 12)


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


# ------------------------------------------------------------------------------ the recipe


HALF = {"half": {"dtype": "float16", "keep": "norms"}}


def test_a_recipe_keeps_modules_by_their_exact_names():
    recipe = keeping(Candidate("half", HALF), ("a[0]", "norms"))
    assert recipe.steps["half"]["keep"] == ["norms", r"re:a\[0\]", "re:norms"]
    assert recipe.name == "half + float32 in 2 modules"
    assert keeping(Candidate("half", HALF), ("head",)).name == "half + float32 head"
    assert recipe.cost == Candidate("half", HALF).cost + 1


class Stub:
    """A candidate that runs; its calls take as long as it keeps modules."""

    peak, seconds, first_seconds = None, 0.0, 0.0

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


# ------------------------------------------------------------------------------ whole tunings


@pytest.fixture
def half_is_fast(monkeypatch):
    """Recipes in 16 bits are fast, also those that keep modules."""

    class Timed(PreparedCandidate):
        def __init__(self, model, candidate, pool, **how):
            super().__init__(model, candidate, pool, **how)
            self._mean, self.seconds = 0.1 if candidate.precision is None else 0.05, 1e-3

        def turn(self, number):
            return self._mean * (1 + 0.001 * (number % 3))

    monkeypatch.setattr(session, "PreparedCandidate", Timed)


def tuned_with(model, batch, **how):
    return tune(model, batch, **{"cache": False, "budget": 20.0, **how})


def test_the_one_module_that_overflows_stays_in_float32(half_is_fast, tmp_path, capsys):
    model = seeded(Net, Energy())
    found = tuned_with(model, LOUD, allow=["half"])
    assert found.recipe["half"]["keep"] == ["norms", "middle"]
    assert found.winner.endswith("+ float32 middle")
    (kept,) = found.rows[0].kept
    assert (kept.module, kept.error) == ("middle", None)
    assert kept.time_ratio == pytest.approx(1.0, rel=0.01)
    assert found.row("half").status == "wrong"
    assert found.pipeline.apply(copy.deepcopy(model))(LOUD).isfinite().all()
    found.save(tmp_path / "tune.json")
    assert Tuning.load(tmp_path / "tune.json") == found
    show_tune(found)
    sentence = kept_rows(found)[0].sentence
    assert sentence.startswith("middle stays in float32: its error is infinite in float16, 0.000")
    assert sentence.endswith("kept; +0 % time of a call")
    assert sentence in " ".join(capsys.readouterr().out.split())


def test_the_module_that_spoils_the_metric_stays_in_float32(half_is_fast):
    class Shifts(Net):
        def forward(self, x):
            return self.last(self.middle(self.first(x), by={"large": 1000.0}))

    model, batch = seeded(Shifts, Offset()), LOUD / 1000
    expected = model(batch).detach()

    def agreement(model, batch):
        return -float((model(batch).float() - expected).abs().mean())

    found = tuned_with(model, batch, allow=["bfloat16"], metric=agreement, max_drop=0.01)
    assert found.recipe["half"]["keep"] == ["norms", "middle"]
    assert found.rows[0].kept[0].error > 0.5


def test_nothing_is_kept_where_nothing_fails(half_is_fast):
    found = tuned_with(seeded(Net, nn.ReLU()), LOUD / 1000, allow=["bfloat16"])
    assert found.recipe["half"]["keep"] == "norms"
    assert not any(row.kept for row in found.rows)


def test_a_model_that_no_set_makes_right_says_so(half_is_fast):
    found = tuned_with(seeded(Whole, nn.ReLU()), LOUD, allow=["half"])
    assert "half" not in found.recipe
    assert "no set of modules in float32 makes it right" in found.row("half").reason


@pytest.mark.slow
def test_the_kept_module_is_in_the_recipe_and_on_the_page(half_is_fast, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["model._target_=sample_nets.overflowing", "input.shape=[2,3,12,12]", "device=cpu"]
    tuning = ["task=tune", "tune.allow=[half]", "tune.cache=false", "tune.budget=20"]
    assert cli.run([*words, *tuning, "bench=none", "hydra.run.dir=run"]) == 0
    assert recipe.load("run/recipe.yaml")["half"]["keep"] == ["norms", "1"]
    page = Path("run/report.html").read_text(encoding="utf-8")
    assert 'aria-label="Modules in float32"' in page
    assert "infinite in float16" in page


class Whole(Net):
    """Its own code overflows, so no part of it helps."""

    def forward(self, x):
        return (super().forward(x).square() + 1).sqrt()


@pytest.mark.parametrize(
    ("make", "status", "reason", "keep"),
    [
        (lambda: Net(Energy()), "pass", "it is right with middle in float32", ["norms", "middle"]),
        (lambda: Net(nn.ReLU()), "pass", "it is right with norms in float32 alone", ["norms"]),
        (lambda: Whole(nn.ReLU()), "fail", "contains NaN or Inf; no set of modules", ["norms"]),
    ],
)
def test_modules_to_keep_are_found_without_a_race(make, status, reason, keep):
    found = keep_in_float32(seeded(make), LOUD, dtype="float16")
    assert found.status == status
    assert reason in found.reason
    assert found.steps == {"half": {"dtype": "float16", "keep": keep}}


@pytest.mark.parametrize(
    ("how", "wrong"),
    [
        ({"dtype": "float8"}, "steps.half.dtype: 'float8' is not allowed"),
        ({"mode": "trian"}, "mode: 'trian' is not a mode; did you mean 'train'?"),
        ({"mode": "train", "dtype": "float16"}, "parameters in float16 cannot be trained"),
        ({"budget": 0}, "tune.budget: 0.0 is not a time"),
    ],
)
def test_an_invalid_search_is_refused(how, wrong):
    with pytest.raises(PrepareError) as error:
        keep_in_float32(seeded(Net, nn.ReLU()), LOUD, **how)
    assert wrong in str(error.value)


class Own(nn.Module):
    """Makes a tensor in float32, which 16-bit inputs do not fit."""

    def forward(self, x):
        return x @ torch.ones(x.shape[-1], x.shape[-1])


def large(net):
    nn.init.constant_(net.first.weight, 7e4)
    return net


@pytest.mark.parametrize(
    ("make", "kept"),
    [(lambda: Net(Own()), "middle"), (lambda: large(Net(nn.ReLU())), "first")],
)
def test_a_module_that_does_not_run_in_16_bits_is_kept(make, kept):
    found = keep_in_float32(seeded(make), LOUD / 1e6, dtype="float16")
    assert found.status == "pass"
    assert [(each.module, each.error) for each in found.kept] == [(kept, None)]


def test_a_model_that_does_not_run_at_all_is_an_error():
    class Picky(Net):
        def forward(self, x):
            return super().forward(x) @ torch.ones(3, 3)

    with pytest.raises(ModelError, match="forward of Picky"):
        keep_in_float32(seeded(Picky, nn.ReLU()), LOUD)


def test_the_page_has_a_table_of_modules_in_float32():
    row = record().rows[0]
    kept = (KeptModule("head", 0.5, 0.002, 1.034), KeptModule("neck", None, 0.001, None))
    tuning = record(rows=(dataclasses.replace(row, kept=kept), *record().rows[1:]))

    class Run:
        audit = None

    Run.tuning = tuning
    rows = tuned(Run)["kept"]
    assert [tuple(each) for each in rows] == [
        ("head", "bfloat16", "0.5", "0.002", "+3 %"),
        ("neck", "bfloat16", "infinite", "0.001", ""),
    ]
