"""Test the estimates of time and memory, and runs that do not fit."""

import warnings

import pytest
import torch
from torch import nn

from prepare.core.forward.call import call_of
from prepare.verify.execution.budget import Budget, Cost, estimate
from prepare.verify.execution.determinism import training_flags
from verify_checks import FLAT, Draws, check
from verify_faults import Net


def estimated(model, batch):
    return estimate(model, call_of(batch), training_flags(model, "eval"))


@pytest.mark.parametrize(
    ("limit", "reason"),
    [({"memory": 1000}, "the limit is 1000 bytes"), ({"seconds": 1e-9}, "s are left")],
)
def test_a_run_that_does_not_fit_is_cannot_tell_with_the_reason(limit, reason):
    result = check(Net(), FLAT, torch.randn(2, 3, 16, 16), **limit)
    assert result.status == "cannot tell"
    assert reason in result.reason


def test_the_reference_runs_in_float32_if_float64_does_not_fit():
    model, batch = nn.Conv2d(3, 4, 3), torch.randn(2, 3, 32, 32)
    cost = estimated(model, batch)
    memory = cost.bytes(torch.float64, backward=True) - 1
    result = check(model, FLAT, batch, memory=memory)
    assert (result.status, result.reference) == ("pass", "float32")
    assert check(model, FLAT, batch).reference == "float64"


def test_a_float64_convolution_is_estimated_with_its_unfolding():
    model, batch = nn.Conv3d(4, 8, 3, padding=1), torch.randn(2, 4, 16, 16, 16)
    cost = estimated(model, batch)
    assert cost.unfolded == {False: [27 * batch.numel()]}
    assert cost.operations == 2 * 27 * 4 * 8 * 2 * 16**3
    assert cost.bytes(torch.float64, backward=False) > 27 * batch.numel() * 8
    assert cost.bytes(torch.bfloat16, backward=False) < 27 * batch.numel() * 2


def test_the_estimate_runs_the_model_if_shapes_are_not_enough():
    class Looks(nn.Conv2d):
        def forward(self, x):
            return super().forward(x) if float(x.sum()) < 1e9 else x

    assert estimated(Looks(3, 4, 3), torch.randn(1, 3, 8, 8)).operations > 0


def test_the_estimate_needs_only_shapes_and_gives_no_warning():
    kinds = []

    def draw(x):
        warnings.warn("a model's own", stacklevel=1)
        kinds.append(type(x))
        return x * torch.rand_like(x)

    assert estimated(Draws(draw), torch.randn(2, 3, 8, 8)).operations > 0
    assert [kind.__name__ for kind in kinds] == ["FakeTensor"]


def test_a_budget_says_why_a_run_does_not_fit():
    budget = Budget(10.0, 2**20)
    large = Cost(elements=2**20)
    assert "4.0 MiB, the limit is 1.0 MiB" in budget.refuses(large, torch.float32, backward=False)
    assert "a run in float64 takes about" in budget.refuses(Cost(operations=10**12), torch.float64)
    assert budget.refuses(Cost(elements=10), torch.float32) == ""


@pytest.mark.parametrize(
    ("took", "left", "ending"), [(1.0, 1.5, ""), (4.0, 3.0, "about 4 s, but 3 of 7 s are left")]
)
def test_the_time_of_a_run_scales_the_next_estimate(monkeypatch, took, left, ending):
    now = [0.0]
    monkeypatch.setattr("prepare.verify.execution.budget.time.monotonic", lambda: now[0])
    budget, cost = Budget(took + left, 2**30), Cost(operations=6 * 10**9)  # by the estimate 2 s
    with budget.timing(cost, torch.float64, backward=False):
        now[0] += took
    refusal = budget.refuses(cost, torch.float64, backward=False)
    assert refusal.endswith(ending)
    assert bool(refusal) == bool(ending)
    assert budget.refuses(cost, torch.float32, backward=False) == ""
