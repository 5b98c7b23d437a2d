"""Tuning from end to end: the result, an unchanged model, arguments, limits, real candidates."""

import math
import sys
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from prepare import recipe
from prepare.errors import ConfigError, ModelError, RefusedError
from prepare.stages.bench.variant import Variant
from prepare.stages.tune import candidate_run, session, tune
from prepare.stages.tune.candidate_run import PreparedCandidate
from prepare.stages.tune.candidates import AS_DECLARED, Candidate, candidates
from prepare.stages.tune.records import UNPREPARED
from prepare.stages.tune.stage import TuneStage
from prepare.step import ModuleStep
from sample_nets import model_state, small, wrong_in_training
from tune_checks import BATCH, found_with


def test_a_tuning_has_a_pipeline_a_recipe_and_a_row_per_candidate(timed, tmp_path):
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
def test_tuning_leaves_the_model_and_global_state_unchanged(timed, mode):
    model = wrong_in_training()
    model[0].weight.grad = torch.ones_like(model[0].weight)
    before, state, training = model_state(model), torch.get_rng_state(), model.training
    kinds = [type(module) for module in model.modules()]
    found_with(timed, {}, model, mode=mode)
    assert model_state(model) == before
    assert torch.equal(torch.get_rng_state(), state)
    assert (model.training, [type(m) for m in model.modules()]) == (training, kinds)
    assert torch.equal(model[0].weight.grad, torch.ones_like(model[0].weight))


@pytest.mark.parametrize("at", [1, 4, 9])
def test_an_interrupt_leaves_the_model_and_the_cache_unchanged(timed, monkeypatch, at, tmp_path):
    model, calls = wrong_in_training(), []
    before, kinds = model_state(model), [type(module) for module in model.modules()]
    plain = session.PreparedCandidate.turn

    def interrupted(self, number):
        calls.append(number)
        if len(calls) == at:
            raise KeyboardInterrupt
        return plain(self, number)

    monkeypatch.setattr(session.PreparedCandidate, "turn", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tune(model, BATCH, cache=tmp_path / "cache", budget=2.0)
    assert (model_state(model), [type(m) for m in model.modules()]) == (before, kinds)
    assert not list(tmp_path.rglob("*"))


def test_a_layout_with_wrong_gradients_does_not_win_in_training(timed):
    torch.manual_seed(0)
    batch = torch.randn(1, 3, 16, 16)
    fast = {"channels_last": 0.01, "channels_last + input": 0.01, "channels_last + repair": 0.05}
    found = found_with(timed, fast, wrong_in_training(), batch, mode="train")
    assert found.winner == "channels_last + repair"
    assert found.row("channels_last").status == "failed"
    assert "wrong gradients" in found.row("channels_last").reason


def test_a_recipe_with_wrong_outputs_does_not_win(timed, plugin):
    @plugin("bends")
    class Bends(ModuleStep):
        """Replace the activation."""

        def targets(self, model):
            return (name for name, module in model.named_modules() if type(module) is nn.ReLU)

        def rewrite(self, model, name):
            return {name: nn.Tanh()}

    declared = {"bends": {}}
    found = found_with(timed, {AS_DECLARED: 0.01}, small().eval(), declared=declared)
    lost = found.row(AS_DECLARED)
    assert (found.winner, lost.status, lost.verified) == (UNPREPARED, "wrong", "fail")
    assert lost.error > lost.allowed


def test_bfloat16_wins_where_allowed_fast_and_correct(timed):
    found = found_with(timed, {"bfloat16": 0.03}, small().eval(), allow=["bfloat16"])
    assert found.winner == "bfloat16"
    assert found.pipeline.apply(small())(BATCH).dtype == torch.bfloat16


class Pools(nn.Module):
    def forward(self, x):
        return nn.functional.avg_pool3d(x, 2)


def test_a_candidate_that_raises_has_the_reason(timed):
    model = nn.Sequential(nn.Conv3d(1, 2, 3), Pools())
    found = found_with(timed, {}, model, torch.ones(1, 1, 8, 8, 8), allow=["bfloat16"])
    lost = found.row("bfloat16")
    assert lost.status == "failed"
    assert "'BFloat16'" in lost.reason
    assert found.row(UNPREPARED).status == "winner"


def test_progress_names_the_stage_the_leader_and_the_time_left(timed):
    from contextlib import contextmanager

    said = []

    @contextmanager
    def progress(text):
        said.append(text)
        yield

    found_with(timed, {"channels_last": 0.05}, small().eval(), progress=progress)
    assert said[0] == "trying unprepared; 5 s left"
    assert any(
        text.startswith("verifying channels_last; best so far channels_last (2.0x faster), ")
        for text in said
    )
    assert said[-1].endswith(" s left")


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"allow": ["halb"]}, "tune.allow: 'halb' is not allowed; did you mean 'half'? allowed: bfloat16, half, compile"),
        ({"allow": "bfloat"}, "tune.allow: 'bfloat' is not allowed; did you mean 'bfloat16'? allowed: bfloat16, half, compile"),
        ({"budget": 0}, "tune.budget: 0.0 is not a time; give seconds, as in 60"),
        ({"budget": math.inf}, "tune.budget: inf is not a time; give seconds, as in 60"),
        ({"allow": ["half"], "mode": "train"}, "tune.allow: parameters in float16 cannot be trained, and this is mode=train; allow bfloat16, or tune under autocast with amp=float16"),
        ({"mode": "test"}, "mode: 'test' is not a mode; allowed: eval, train"),
        ({"amp": "flaot16"}, "amp: 'flaot16' is not allowed; did you mean 'float16'? allowed: none, bfloat16, float16"),
        ({"calls": 0}, "tune.calls: 0 is not a number of calls; give one from 1 on, as in 1000"),
    ],
)  # fmt: skip
def test_an_invalid_argument_is_reported_with_its_remedy(how, message):
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


def test_all_candidates_time_as_many_calls_as_the_baseline(monkeypatch):
    counts, plain = set(), Variant.sample

    def sample(variant, batch, clock):
        counts.add((variant.calls, variant.warm))
        return plain(variant, batch, clock)

    monkeypatch.setattr(Variant, "sample", sample)
    tune(small(), BATCH, budget=0.5, cache=False)
    assert len(counts) == 1


@pytest.mark.parametrize(("budget", "seconds"), [(2.0, 30.0), (90.0, 90.0)])
def test_a_verification_may_take_as_long_as_the_tuning(monkeypatch, budget, seconds):
    given, verify = [], candidate_run.verify

    def told(*args, **how):
        given.append(how["seconds"])
        return verify(*args, **how)

    monkeypatch.setattr(candidate_run, "verify", told)
    candidate, model = Candidate("flat", {"conv2d_memory_format": {}}), small().eval()
    options = TuneStage(budget=budget)
    tuning = session.TuningSession(
        model=model, batch=BATCH, options=options, mode="eval", seed=0, progress=nullcontext
    )
    assert PreparedCandidate(tuning, candidate, [[BATCH]]).check({}).status == "pass"
    assert given == [seconds]


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_a_real_tuning_finds_a_correct_winner(mode):
    found = tune(small(), BATCH, mode=mode, allow=["bfloat16"], budget=1.0, cache=False)
    assert found.rows[0].status == "winner"
    assert found.rows[0].verified in (["", "pass"] if found.winner == UNPREPARED else ["pass"])
    model = found.pipeline.apply(small().train(mode == "train"))
    assert model(BATCH).shape == (2, 4, 8, 8)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["eval", "train"])
def test_a_real_tuning_runs_compilers(mode):
    found = tune(small(), BATCH, mode=mode, allow=["compile"], budget=60.0, cache=False)
    compiled = [row for row in found.rows if "compile" in row.steps and row.rounds]
    assert compiled
    assert {row.status for row in compiled} <= {"winner", "slower", "not faster"}


def test_a_tuning_is_of_its_autocast_and_its_key_holds_it(timed, tmp_path):
    found = [
        found_with(timed, {}, small(), cache=str(tmp_path), amp=amp)
        for amp in ("none", "bfloat16", "bfloat16")
    ]
    assert [tuning.amp for tuning in found] == ["none", "bfloat16", "bfloat16"]
    assert [tuning.from_cache for tuning in found] == [False, False, True]
    keys = [tuning.conditions["amp"] for tuning in found]
    assert keys == ["none", "bfloat16", "bfloat16"]


def test_candidates_for_autocast_avoid_the_known_issues_of_its_dtype():
    model = nn.Sequential(nn.Conv3d(2, 4, 3), nn.ReLU()).train()

    def found(amp):
        return candidates(model, declared={}, allow=(), mode="train", amp=amp)

    assert all("repair_layout" in each.steps for each in found("bfloat16")[1:])
    assert not all("repair_layout" in each.steps for each in found("none")[1:])


def test_the_first_call_counts_where_the_number_of_calls_is_known(monkeypatch):
    def slow_first_call(self, like, *, real=PreparedCandidate._warm_up):
        real(self, like)
        prepared = "conv2d_memory_format" in self.pipeline.steps
        self.first_seconds = 100.0 if prepared else 0.0

    def timed_by_recipe(variant, batch, clock):
        return 0.01 if "channels_last" in variant.name else 0.1

    monkeypatch.setattr(PreparedCandidate, "_warm_up", slow_first_call)
    monkeypatch.setattr(Variant, "sample", timed_by_recipe)
    often, rarely = (
        tune(small().eval(), BATCH, cache=False, budget=2.0, calls=calls) for calls in (10**6, 10)
    )
    assert often.winner != UNPREPARED
    assert rarely.winner == UNPREPARED
    assert rarely.row("channels_last").first_seconds == 100.0
    assert rarely.row("channels_last").seconds == pytest.approx(10.01)
    assert (often.conditions["calls"], rarely.conditions["calls"]) == (10**6, 10)
