"""Variants of a bench that fail, and those that are refused."""

import copy

import pytest
import torch
from torch import nn

from clocks import Clock
from prepare.errors import ConfigError, RefusedError
from prepare.stages.bench import VariantResult, compare

BATCH = torch.ones(4, 3)


@pytest.mark.parametrize("breaks_at", [0, 1, 2, 5])
def test_a_failing_variant_is_reported_and_the_others_continue(breaks_at):
    clock = Clock()
    variants = {name: clock.takes(0.1) for name in ("plain", "other")}
    variants["broken"] = clock.takes(0.1, breaks_at=breaks_at)
    found = compare(variants, BATCH, _clock=clock)
    assert found.row("broken") == VariantResult(
        name="broken", verdict="failed", device="cpu", reason="MemoryError: no more"
    )
    assert found.row("other").verdict == "no difference"
    assert found.repeats >= 8


@pytest.mark.parametrize("last", range(1, 12))
def test_a_variant_that_failed_is_not_called_again(last):
    clock, calls = Clock(), []

    def breaks(x):
        calls.append(x)
        clock.now += 0.1
        if len(calls) == last:
            raise MemoryError

    compare({"plain": breaks, "other": clock.takes(0.1)}, BATCH, budget=5, _clock=clock)
    assert len(calls) == last


def test_a_failure_in_a_model_names_the_module_and_a_likely_cause():
    model = nn.Sequential(nn.Conv2d(3, 4, 1))
    found = compare({"a": nn.Identity(), "b": model}, torch.ones(1, 2, 4, 4), budget=0.2)
    assert found.row("b").reason.startswith("forward of 0 (Conv2d): RuntimeError: Given groups=1")
    assert "the example input may not fit this model" in found.row("b").reason


def test_models_on_meta_or_without_gradients_fail_with_a_reason():
    found = compare({"a": nn.Linear(3, 3, device="meta")}, BATCH, budget=0.2)
    assert found.row("a").reason.startswith("its device: meta computes nothing")
    found = compare({"a": nn.Linear(3, 3).requires_grad_(False)}, BATCH, train=True, budget=0.2)
    assert (
        found.row("a").reason == "its output: does not require gradients; there is nothing to train"
    )


def test_models_that_share_a_tensor_are_refused_functions_are_not():
    model = nn.Linear(3, 3)
    shares = nn.Sequential(nn.Linear(3, 3))
    shares[0].weight.data = model.weight.data[:]
    with pytest.raises(RefusedError, match=r"share the tensor weight: preparing"):
        compare({"one": model, "other": shares}, BATCH)
    found = compare({"one": lambda x: model(x), "other": model}, BATCH, budget=0.2)
    assert "failed" not in {row.verdict for row in found.rows}


def test_all_invalid_names_and_numbers_are_reported_at_once():
    with pytest.raises(ConfigError) as raised:
        compare(
            {"plain": nn.Identity()},
            BATCH,
            baseline="plane",
            budget=0,
            precision=2.0,
            format={"x": copy.copy},
        )
    wheres = [problem.where for problem in raised.value.problems]
    assert wheres == ["baseline", "format", "budget", "precision"]
    assert "did you mean 'plain'?" in str(raised.value)
    with pytest.raises(ConfigError, match="variants: the mapping is empty; give"):
        compare({}, BATCH)
