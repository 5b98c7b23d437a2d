"""Tunings that keep modules in float32, from end to end."""

import copy
import dataclasses
from pathlib import Path

import pytest
import torch
from torch import nn

from made import show
from prepare import recipe
from prepare.app.cli import main as cli
from prepare.errors import ModelError, PrepareError
from prepare.stages.tune import Tuning, keep_in_float32, session, tune
from prepare.stages.tune.candidate_run import PreparedCandidate
from prepare.stages.tune.document import kept_rows
from prepare.stages.tune.records import KeptModule
from test_tune_record import record
from tune_checks import LOUD, Energy, Net, seeded


@pytest.fixture
def half_is_fast(monkeypatch):
    """Recipes in 16 bits are fast, also those that keep modules."""

    class Timed(PreparedCandidate):
        def __init__(self, tuning, candidate, pool, **how):
            super().__init__(tuning, candidate, pool, **how)
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
    show("tune", found)
    sentence = kept_rows(found)[0].sentence
    assert sentence.startswith("middle stays in float32: its error is infinite in float16, 0.000")
    assert sentence.endswith("kept; +0 % time of a call")
    assert sentence in " ".join(capsys.readouterr().out.split())


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

    rows = kept_rows(tuning)
    assert [tuple(each) for each in rows] == [
        ("head", "bfloat16", "0.5", "0.002", "+3 %"),
        ("neck", "bfloat16", "infinite", "0.001", ""),
    ]
