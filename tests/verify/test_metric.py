"""Test a metric of the user's own: its limit, what it is called with, and what is restored."""

import pytest
import torch
from torch import nn

from prepare.errors import RefusedError
from prepare.pipeline import Pipeline
from prepare.stages.verify import verify
from verify_checks import FLAT, checks_by_kind, prepared

HALF = {"half": {"dtype": "bfloat16", "keep": []}, "input_format": {}}


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval(), torch.randn(2, 3, 8, 8)


def error_of(steps, limit, **options):
    """Verify with the negative distance from the reference's outputs as the metric."""
    model, batch = net()
    exact = model(batch).detach()

    def closeness(each, x):
        return -(each(x).float() - exact).abs().max()

    pipeline, changed = prepared(model, steps)
    return verify(
        model, changed, batch, pipeline=pipeline, metric=closeness, max_drop=limit, **options
    )


def test_a_metric_fails_beyond_its_limit_where_tensors_pass():
    passed, failed = error_of(HALF, 0.5), error_of(HALF, 1e-4)
    assert (passed.status, checks_by_kind(passed)["metric"].status) == ("pass", "pass")
    assert failed.status == "fail"
    assert checks_by_kind(failed)["outputs"].status == "pass"
    assert failed.reason.startswith("metric: ")
    assert "on the unprepared model" in failed.reason
    assert "and 0.0001 is allowed" in failed.reason
    assert "allow a larger max_drop" in failed.advice
    assert "keep the modules that prepare.stages.tune.keep_in_float32 finds" in failed.advice


def test_a_metric_is_called_under_the_autocast_of_the_prepared_model():
    check = checks_by_kind(error_of(FLAT, 0.5, amp="bfloat16"))["metric"]
    assert check.error > 1e-4
    assert checks_by_kind(error_of(FLAT, 0.5))["metric"].error < 1e-5


def test_a_metric_gets_formatted_inputs_eval_mode_and_leaves_no_trace():
    seen = []
    model, batch = net()
    model.train()
    pipeline, changed = prepared(model, HALF)
    before = changed[1].running_mean.clone()

    def metric(each, x):
        seen.append((each.training, torch.is_grad_enabled(), x.dtype))
        each(torch.randn(2, 3, 8, 8))  # data of its own, which nobody has formatted
        each.train()
        each(x)
        return 1

    result = verify(model, changed, batch, pipeline=pipeline, metric=metric, max_drop=0)
    assert checks_by_kind(result)["metric"].status == "pass"
    assert seen == [(False, False, torch.float32), (False, False, torch.bfloat16)]
    assert changed.training
    assert torch.equal(changed[1].running_mean, before)
    assert not changed._forward_pre_hooks


@pytest.mark.parametrize(
    ("values", "status", "says"),
    [
        ((float("nan"), 1.0), "cannot tell", "on the unprepared model it is nan"),
        ((1.0, float("nan")), "fail", "on the prepared model it is nan"),
        ((1.0, "high"), "fail", "on the prepared model it raised ValueError"),
        ((1.0, 2.0), "pass", "a drop of -1"),
    ],
)
def test_a_metric_that_is_not_a_number_never_passes(values, status, says):
    model, batch = net()
    pipeline, changed = prepared(model, FLAT)
    returned = iter(values)
    result = verify(
        model, changed, batch, pipeline=pipeline, metric=lambda *_: next(returned), max_drop=0
    )
    check = checks_by_kind(result)["metric"]
    assert check.status == status
    assert says in check.note


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"metric": max}, "max_drop: is missing; give max_drop=0.001"),
        ({"max_drop": 0.1}, "max_drop: limits a metric, and there is none; give metric="),
        ({"metric": "acc", "max_drop": 1}, "metric: a str is not a function; give a function of"),
        ({"metric": max, "max_drop": -1}, "max_drop: -1 is not a drop; give one from 0 on"),
    ],
)
def test_a_metric_and_its_limit_need_each_other(options, says):
    model, batch = net()
    _, changed = prepared(model, FLAT)
    with pytest.raises(RefusedError) as raised:
        verify(model, changed, batch, **options)
    assert says in str(raised.value)


def test_a_compiled_model_is_measured_as_it_is_used():
    model, batch = net()
    calls = []

    def metric(each, x):
        calls.append(each._compiled_call_impl is not None)
        return each(x).sum()

    pipeline = Pipeline.from_config({"compile": {"backend": "eager"}, "input_format": {}})
    changed = pipeline.apply(net()[0])
    verify(model, changed, batch, pipeline=pipeline, metric=metric, max_drop=0.1)
    assert calls == [False, True]
