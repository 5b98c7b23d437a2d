"""Tuning from end to end: the result, an unchanged model, arguments, limits, real candidates."""

import math
import sys

import pytest
import torch
from torch import nn

from prepare import recipe
from prepare.errors import ConfigError, ModelError, RefusedError
from prepare.stages.tune import tune, tune_model
from prepare.stages.tune.candidates import AS_DECLARED
from prepare.stages.tune.records import UNPREPARED
from prepare.step import ModuleStep
from sample_nets import small, wrong_in_training
from small_nets import facts

BATCH = torch.ones(2, 3, 12, 12)


def found_with(timed, means, model, batch=BATCH, **how):
    timed.update(means)
    return tune(model, batch, **({"budget": 100.0} | how))


def test_a_tuning_has_a_pipeline_a_recipe_and_a_row_per_candidate(timed, tmp_path):
    model = small().eval()
    found = found_with(timed, {"channels_last": 0.05}, model)
    assert (found.winner, found.last.settings["train"]) == ("channels_last", False)
    assert found.rows[0].name == found.winner
    assert found.row("channels_last").verified == "pass"
    assert found.row("channels_last").error <= found.row("channels_last").allowed
    assert found.row(UNPREPARED).ratio == 1.0
    assert found.row("channels_last").ratio == pytest.approx(0.5, rel=0.02)
    assert found.recipe == {"conv2d_memory_format": {
        "memory_format": "channels_last", "include": [], "exclude": []}}  # fmt: skip
    found.pipeline.save(tmp_path / "recipe.yaml")
    assert recipe.load(tmp_path / "recipe.yaml") == found.recipe
    assert not found.pipeline.plan(found.pipeline.apply(model))


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_tuning_leaves_the_model_and_global_state_unchanged(timed, mode):
    model = wrong_in_training()
    model[0].weight.grad = torch.ones_like(model[0].weight)
    before, state = facts(model), torch.get_rng_state()
    found_with(timed, {}, model, mode=mode)
    assert facts(model) == before
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(model[0].weight.grad, torch.ones_like(model[0].weight))


def test_none_may_be_faster_than_the_unprepared_model(timed):
    found = found_with(
        timed, dict.fromkeys(("channels_last", "channels_last + input"), 0.12), small().eval()
    )
    assert (found.winner, found.recipe) == (UNPREPARED, {})
    row = found.row("channels_last")
    assert (row.status, row.verdict) == ("dropped", "slower")
    assert row.reason == f"dropped after {row.rounds} rounds"


def test_a_recipe_that_only_looked_faster_does_not_win(timed, monkeypatch):
    looks, compared = [], tune_model.compare

    def luck(models, *given, **how):
        """Only the first look finds it faster."""
        timed["channels_last"] = 0.1 if looks else 0.05
        looks.extend(name for name in models if name == "channels_last")
        return compared(models, *given, **how)

    monkeypatch.setattr(tune_model, "compare", luck)
    found = found_with(timed, {}, small().eval())
    assert len(looks) == 2
    row = found.row("channels_last")
    assert (found.winner, row.status, row.reason) == (UNPREPARED, "timed", "not shown to be faster")
    assert row.rounds == found.last.repeats


def test_of_recipes_that_are_as_fast_the_simplest_wins(timed):
    means = {"channels_last + input + fuse": 0.0495, "channels_last": 0.05}
    found = found_with(timed, means, small().eval())
    assert found.winner == "channels_last"
    lost = found.row("channels_last + input + fuse")
    assert (lost.status, lost.reason) == ("timed", "channels_last is as fast, and simpler")
    fast = found_with(timed, {"channels_last + input + fuse": 0.045}, small().eval())
    assert fast.winner == "channels_last + input + fuse"


def test_four_recipes_at_most_are_verified_and_compared_at_last(timed, monkeypatch):
    verified, verify = [], tune_model.verify
    monkeypatch.setattr(tune_model, "verify", lambda *a, **k: verified.append(k) or verify(*a, **k))
    found = found_with(timed, {}, small().eval(), allow=["bfloat16"])
    assert verified == []  # none looked faster
    names = [row.name for row in found.rows if row.name != UNPREPARED]
    found = found_with(timed, dict.fromkeys(names, 0.05), small().eval(), allow=["bfloat16"])
    assert len(verified) == 4
    assert {each["seconds"] for each in verified} == {100.0}
    assert sum(row.status in ("winner", "timed") for row in found.rows) == 5
    assert len(found.last.rows) == 5
    assert {row.verified for row in found.rows if row.status == "dropped"} == {""}


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


@pytest.mark.parametrize(
    ("how", "where", "remedy"),
    [
        ({"allow": ["halb"]}, "tune.allow", "did you mean 'half'?"),
        ({"budget": 0}, "tune.budget", "give seconds"),
        ({"budget": math.inf}, "tune.budget", "give seconds"),
        ({"allow": ["half"], "mode": "train"}, "tune.allow", "amp=float16"),
        ({"mode": "test"}, "mode", "eval, train"),
        ({"amp": "flaot16"}, "amp", "did you mean 'float16'?"),
    ],
)
def test_an_invalid_argument_is_reported_with_its_remedy(how, where, remedy):
    with pytest.raises((ConfigError, RefusedError)) as error:
        tune(small(), BATCH, **how)
    assert error.value.problems[0].where == where
    assert remedy in str(error.value)


def test_a_model_that_cannot_be_tuned_is_refused():
    with pytest.raises(RefusedError, match="lazy module"):
        tune(nn.LazyConv2d(3, 3), BATCH)
    with pytest.raises(RefusedError, match="meta holds no data"):
        tune(nn.Conv2d(3, 3, 3, device="meta"), BATCH)
    with pytest.raises(RefusedError, match="inference_mode"), torch.inference_mode():
        tune(small(), BATCH)
    with pytest.raises(ModelError, match="the unprepared model: forward of 0"):
        tune(small(), torch.ones(2, 5, 12, 12))
    stubborn = small()
    stubborn.handle = sys.stdout
    with pytest.raises(RefusedError, match="cannot be copied"):
        tune(stubborn, BATCH)


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_a_real_tuning_finds_a_correct_winner(mode):
    found = tune(small(), BATCH, mode=mode, allow=["bfloat16"], budget=1.0)
    assert found.rows[0].status == "winner"
    assert found.rows[0].verified in (["", "pass"] if found.winner == UNPREPARED else ["pass"])
    model = found.pipeline.apply(small().train(mode == "train"))
    assert model(BATCH).shape == (2, 4, 8, 8)
