"""Autocast, metrics, memory and the number of calls in a tuning."""

import pytest
from torch import nn

from prepare.bench.samples import Series
from prepare.errors import ConfigError, RefusedError
from prepare.tune import candidate_run, tune
from prepare.tune.candidate_run import PreparedCandidate
from prepare.tune.candidates import candidates
from prepare.tune.records import UNPREPARED
from sample_nets import small
from tune_checks import BATCH, found_with


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


def test_a_tuning_refuses_an_unknown_amp():
    with pytest.raises(RefusedError, match="amp: 'half' is not allowed"):
        tune(small(), BATCH, amp="half")


def test_a_recipe_whose_metric_drops_too_much_cannot_win(timed):
    def plain(model, batch):
        return float(model[0].weight.is_contiguous())

    means = {"channels_last": 0.01, "channels_last + input": 0.01}
    found = found_with(timed, means, small().eval(), metric=plain, max_drop=0.5)
    assert found.winner == UNPREPARED
    assert found.row("channels_last").status == "wrong"
    assert "metric: plain 1 on the unprepared model, 0 on" in found.row("channels_last").reason
    assert found.conditions["max_drop"] == 0.5
    assert found.conditions["metric"].endswith("plain")


def test_a_recipe_that_needs_too_much_memory_is_dropped(timed, monkeypatch):
    means = {"channels_last": 0.01}
    monkeypatch.setattr(candidate_run.Variant, "peak", lambda *_: (2**31, ""))
    found = found_with(timed, means, small().eval(), max_memory="1GiB")
    assert found.winner == UNPREPARED
    row = found.row("channels_last")
    assert (row.status, row.reason) == (
        "failed",
        "a call needs 2.0 GiB, and max_memory is 1.0 GiB",
    )
    assert found.conditions["max_memory"] == 2**30
    assert found_with(timed, means, small().eval(), max_memory="3GiB").winner == "channels_last"


@pytest.mark.parametrize("wrong", ["lots", 0, True])
def test_a_memory_limit_that_is_not_a_size_is_refused(wrong):
    with pytest.raises(ConfigError, match="max_memory: "):
        tune(small(), BATCH, max_memory=wrong)


def test_the_first_call_counts_where_the_number_of_calls_is_known(monkeypatch):
    def slow_first_call(self, like, *, real=PreparedCandidate._warm_up):
        real(self, like)
        prepared = "conv2d_memory_format" in self.pipeline.steps
        self.first_seconds = 100.0 if prepared else 0.0

    def timed_by_recipe(series, batch, clock):
        return 0.01 if "channels_last" in series.variant.name else 0.1

    monkeypatch.setattr(PreparedCandidate, "_warm_up", slow_first_call)
    monkeypatch.setattr(Series, "sample", timed_by_recipe)
    often, rarely = (
        tune(small().eval(), BATCH, cache=False, budget=2.0, calls=calls) for calls in (10**6, 10)
    )
    assert often.winner != UNPREPARED
    assert rarely.winner == UNPREPARED
    assert rarely.row("channels_last").first_seconds == 100.0
    assert rarely.row("channels_last").seconds == pytest.approx(10.01)
    assert (often.conditions["calls"], rarely.conditions["calls"]) == (10**6, 10)


def test_a_number_of_calls_below_one_is_refused():
    with pytest.raises(ConfigError, match="calls: 0 is not a number of calls; give one from 1 on"):
        tune(small(), BATCH, calls=0)
