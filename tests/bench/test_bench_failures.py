"""Variants of a bench that fail, and those that are refused."""

import copy

import pytest
import torch
from torch import nn

from clocks import Clock, noisy
from prepare.errors import ConfigError, RefusedError
from prepare.pipeline import Pipeline
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


@pytest.mark.parametrize("breaks_at", [0, 7, 8])
def test_variants_are_timed_but_not_compared_if_the_baseline_fails(breaks_at):
    clock = Clock()
    found = compare(
        {"plain": clock.takes(0.1, breaks_at=breaks_at), "other": clock.takes(noisy(0.2, 0.01, 0))},
        BATCH,
        budget=100,
        _clock=clock,
    )
    assert [row.verdict for row in found.rows] == ["failed", "not compared"]
    other = found.row("other")
    assert other.seconds == pytest.approx(0.2, rel=0.02)
    assert (other.ratio, found.aa) == (None, None)


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


def test_the_bench_ends_when_every_variant_has_failed():
    found = compare({"a": Clock().takes(0, breaks_at=0)}, BATCH)
    assert (found.repeats, found.row("a").verdict, found.notes) == (0, "failed", ())


def test_a_failure_in_a_model_names_the_module_and_a_likely_cause():
    model = nn.Sequential(nn.Conv2d(3, 4, 1))
    found = compare({"a": nn.Identity(), "b": model}, torch.ones(1, 2, 4, 4), budget=0.2)
    assert found.row("b").reason.startswith("forward of 0 (Conv2d): RuntimeError: Given groups=1")
    assert found.row("b").reason.endswith("the example input may not fit this model")


def test_a_failure_in_the_formatter_is_named():
    def bad(batch):
        raise ValueError("odd")

    found = compare({"a": nn.Identity()}, BATCH, format={"a": bad}, budget=0.2)
    assert found.row("a").reason == "its format: raised ValueError: odd"


def test_models_on_meta_or_without_gradients_fail_with_a_reason():
    found = compare({"a": nn.Linear(3, 3, device="meta")}, BATCH, budget=0.2)
    assert found.row("a").reason.startswith("its device: meta computes nothing")
    found = compare({"a": nn.Linear(3, 3).requires_grad_(False)}, BATCH, train=True, budget=0.2)
    assert (
        found.row("a").reason == "its output: does not require gradients; there is nothing to train"
    )


def test_the_same_model_as_two_variants_is_refused():
    model = nn.Sequential(nn.Conv2d(3, 4, 3))
    one = Pipeline.from_config({"conv2d_memory_format": {}}).apply(model)
    with pytest.raises(RefusedError) as raised:
        compare({"one": one, "other": model}, torch.ones(1, 3, 8, 8))
    assert str(raised.value) == (
        "variants 'one' and 'other': they are the same model: preparing one changes the other; "
        "build the model once for each, or copy.deepcopy it before it is prepared; "
        "to call one model in two ways, give a function for each"
    )


def test_models_that_share_a_tensor_are_refused_functions_are_not():
    model = nn.Linear(3, 3)
    shares = nn.Sequential(nn.Linear(3, 3))
    shares[0].weight.data = model.weight.data[:]
    with pytest.raises(RefusedError, match=r"share the tensor weight: preparing"):
        compare({"one": model, "other": shares}, BATCH)
    found = compare({"one": lambda x: model(x), "other": model}, BATCH, budget=0.2)
    assert "failed" not in {row.verdict for row in found.rows}


def test_a_lazy_model_is_refused():
    with pytest.raises(RefusedError, match=r"'a': the parameter weight has no shape yet; run one"):
        compare({"a": nn.LazyLinear(3)}, BATCH)


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
    assert str(raised.value).splitlines() == [
        "baseline: 'plane' is not a variant; did you mean 'plain'? variants: plain",
        "format: 'x' is not a variant; variants: plain",
        "budget: 0 is not between 0 and inf; give seconds, as in 20",
        "precision: 2.0 is not between 0 and 1; give 0.02",
    ]
    with pytest.raises(ConfigError, match="variants: the mapping is empty; give"):
        compare({}, BATCH)
