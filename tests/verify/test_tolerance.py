"""Test how large an error a verification allows."""

import copy

import pytest
import torch
from torch import nn

from prepare.pipeline import Pipeline
from prepare.stages.verify import verify
from prepare.stages.verify.tolerance import (
    Deviation,
    compare,
    is_too_noisy,
    rounding_floor,
    rounding_step,
    sensitivity,
)
from processor import BFLOAT16
from verify_checks import FLAT, PIPELINES, check, checks_by_kind, prepared
from verify_faults import Net


def test_bfloat16_is_allowed_the_error_of_bfloat16_and_no_more():
    model, batch = Net(), torch.randn(2, 3, 16, 16)
    pipeline, changed = prepared(model, PIPELINES["bfloat16"])
    assert verify(model, changed, batch, pipeline=pipeline).status == "pass"
    changed.up.register_forward_hook(lambda module, args, out: out * 1.3)
    result = verify(model, changed, batch, pipeline=pipeline)
    assert result.status == "fail"
    assert '"half": {"keep": ["norms", ' in result.advice


class Shifted(nn.Module):
    """Adds a constant: 16-bit numbers far from zero have large errors; a second module subtracts it."""

    def __init__(self, by):
        super().__init__()
        self.by = by

    def forward(self, x):
        return x + self.by


@pytest.mark.skipif(not BFLOAT16, reason="here no convolution keeps the layout in bfloat16")
@pytest.mark.parametrize("mode", ["eval", "train"])
def test_a_missing_16_bit_kernel_still_allows_the_rounding_error(mode):
    reference = nn.Sequential(
        nn.Conv3d(2, 4, 3), nn.AvgPool3d(2), Shifted(64.0), Shifted(-64.0), nn.Conv3d(4, 2, 1)
    ).train(mode == "train")
    batch = torch.randn(1, 2, 8, 8, 8)
    with pytest.raises(RuntimeError, match="BFloat16"):
        copy.deepcopy(reference).bfloat16()(batch.bfloat16())
    pipeline, model = prepared(reference, PIPELINES["bfloat16"])
    result = verify(reference, model, batch, pipeline=pipeline, mode=mode)
    assert result.status == "pass", result.reason
    outputs = checks_by_kind(result)["outputs"]
    assert outputs.error > 4 * torch.finfo(torch.bfloat16).eps * 2**0.5  # more than the floor
    model[2].by = 70.0
    result = verify(reference, model, batch, pipeline=pipeline, mode=mode)
    assert result.status == "fail"


def exceeding(exact, baseline, actual, **options):
    """Compare plain lists of numbers; return which tensors exceed their tolerance."""
    baseline = [{name: torch.tensor(value) for name, value in run.items()} for run in baseline]
    exact, actual = ({n: torch.tensor(v) for n, v in run.items()} for run in (exact, actual))
    result = compare(exact, baseline, actual, dtype=torch.float32, depth=1, **options)
    return {difference.name: difference.exceeds for difference in result}


def test_a_bias_whose_true_gradient_is_zero_is_measured_by_its_weight():
    exact = {"conv.weight": [1.0, 2.0], "conv.bias": [0.0]}
    actual = {"conv.weight": [1.0, 2.0], "conv.bias": [1e-6]}
    assert exceeding(exact, [], actual)["conv.bias"]
    assert not exceeding(exact, [], actual, gradients=True, by_module=True)["conv.bias"]


def test_a_gradient_that_is_missing_is_the_same_as_zeros():
    zeros, ones = {"a": torch.zeros(2)}, {"a": torch.ones(2)}
    options = {"dtype": torch.float32, "depth": 1, "gradients": True}
    assert not compare(zeros, [], {"a": None}, **options)[0].exceeds
    assert compare(ones, [], {"a": None}, **options)[0].exceeds


def test_noise_of_the_baseline_is_allowed_but_garbage_is_not():
    exact, baseline = {"a": [1.0]}, [{"a": [1.01]}]
    assert not exceeding(exact, baseline, {"a": [1.05]})["a"]
    assert exceeding(exact, baseline, {"a": [1.07]})["a"]
    for garbage in (1e30, float("nan")):
        assert exceeding(exact, [{"a": [garbage]}], {"a": [1e20]})["a"]
        assert not exceeding(exact, [{"a": [garbage]}], {"a": [1.0]})["a"]


@pytest.mark.slow
def test_gradients_that_are_all_noise_are_cannot_tell():
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 16, 3, padding=1)]
    for _ in range(20):
        layers += [nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()]
    reference = nn.Sequential(*layers)
    pipeline = Pipeline.from_config({"half": {"dtype": "bfloat16"}, "input_format": {}})
    model = pipeline.apply(copy.deepcopy(reference))
    result = verify(reference, model, torch.randn(1, 3, 8, 8), pipeline=pipeline, mode="train")
    checks = {check.what: check for check in result.checks}
    assert result.status == "cannot tell"
    assert ": the unprepared model in bfloat16 is itself too far off" in result.reason
    assert checks["outputs"].status == "pass"
    for what in ("input gradients", "parameter gradients"):
        assert checks[what].status == "cannot tell"
        assert checks[what].note == (
            "the unprepared model in bfloat16 is itself too far off; with trained weights it may not be"
        )


class SpoilsOnce(nn.Sequential):
    """Scales its weight's gradient in the first channels-last run only."""

    def __init__(self, factor):
        super().__init__(nn.Conv2d(3, 8, 3))
        self.factor, self.first = factor, iter([True])

    def forward(self, x):
        out = super().forward(x)
        if self[0].weight.is_contiguous(memory_format=torch.channels_last) and next(self.first, 0):
            # The same outputs, but other gradients.
            out = out.detach() + self.factor * (out - out.detach())
        return out


@pytest.mark.parametrize(("factor", "status"), [(1e20, "fail"), (1.1, "pass")], ids=["garbage", "noise"])  # fmt: skip
def test_garbage_in_one_run_is_not_excused_by_a_right_one(factor, status):
    torch.manual_seed(0)
    result = check(SpoilsOnce(factor), FLAT, torch.randn(1, 3, 8, 8), mode="train")
    assert result.status == status


# ------------------------------------------------------------------------------------- sensitivity


def scaled_backward(factor):
    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, gradient):
            return gradient * factor

    return lambda module, args, out: Scale.apply(out)


@pytest.mark.parametrize("precision", PIPELINES)
def test_errors_around_the_reported_sensitivity_are_told_apart(precision):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.SiLU(), nn.Conv2d(8, 4, 3))
    batch = torch.randn(2, 3, 16, 16)
    pipeline, changed = prepared(model, PIPELINES[precision])
    clean = verify(model, changed, batch, pipeline=pipeline, mode="train")
    found, place = clean.sensitivity("gradients")
    assert place in {"0", "2", "input 0"}
    for times, status in ((0.2, "pass"), (4.0, "fail")):
        hook = changed[0].register_forward_hook(scaled_backward(1 + times * found))
        result = verify(model, changed, batch, pipeline=pipeline, mode="train")
        hook.remove()
        assert result.status == status


def test_the_sensitivity_is_that_of_the_least_sensitive_module():
    items = [
        Deviation("a.weight", 0.0, 0.02, 0.0),
        Deviation("a.bias", 0.0, 0.01, 0.0),
        Deviation("b.weight", 0.0, 0.005, 0.0),
        Deviation("c.weight", 0.0, 0.9, 0.0, share=1e-6),
    ]
    assert sensitivity(items, by_module=True) == (0.01, "a")
    assert sensitivity(items, by_module=False) == (0.02, "a.weight")
    assert sensitivity([], by_module=True)[1] == ""


def test_a_tensor_without_an_error_is_never_the_worst():
    fine, off = Deviation("fine", 0.0, 0.0, 0.0), Deviation("off", 1.0, 0.5, 0.0)
    assert max((fine, off), key=lambda item: item.excess) is off
    assert Deviation("wrong", 0.1, 0.0, 0.0).excess == float("inf")


def test_only_a_common_factor_of_many_numbers_is_one():
    exact, noise = torch.randn(64), 0.01 * torch.randn(64)
    one = torch.zeros(64)
    one[3] = 5.0
    for expected, actual, is_factor in (
        (exact, exact * 1.01, True),
        (exact, exact * -1.0, True),
        (exact, exact * 1.01 + noise / 10, True),
        (exact, exact + noise, False),
        (exact, exact + 0.01 * exact.abs(), False),
        (one, one * 1.01, False),
        (exact[:4], exact[:4] * 1.01, False),
        (exact, exact * 1.000001, False),  # within the tolerance
    ):
        tensors = ({"a": expected}, [], {"a": actual})
        (found,) = compare(*tensors, dtype=torch.float32, depth=1, gradients=True)
        assert found.is_factor is is_factor


SOME, ZEROS = torch.ones(3), torch.zeros(3)


@pytest.mark.parametrize(
    ("exact", "actual", "gradients", "note"),
    [
        (SOME, None, True, "has no gradient"),
        (None, SOME, True, "has a gradient, but not in the reference"),
        (SOME, None, False, "is missing"),
        (None, SOME, False, "is not in the reference"),
        (SOME, torch.ones(2), False, "has shape [2], in the reference [3]"),
        (SOME, SOME / 0, False, "contains NaN or Inf"),
        (torch.eye(3), (torch.eye(3) / 0).to_sparse(), False, "contains NaN or Inf"),
        (ZEROS, None, True, ""),
        (None, ZEROS, True, ""),
    ],
    ids=str,
)
def test_what_cannot_be_subtracted_is_named_and_exceeds(exact, actual, gradients, note):
    both_missing = {"other": None}
    (found,) = compare(
        both_missing | {"x": exact},
        [],
        both_missing | {"x": actual},
        dtype=torch.float32,
        depth=1,
        gradients=gradients,
    )
    assert (found.note, found.exceeds) == (note, bool(note))


def test_the_allowed_rounding_grows_with_depth_and_dtype():
    one, four = (rounding_floor(torch.float32, depth) for depth in (1, 4))
    assert four == 2 * one == 2 * rounding_floor(torch.float32, 0)
    assert rounding_floor(torch.bfloat16, 1) > 1000 * one
    steps = [rounding_step(dtype) for dtype in (torch.float64, torch.float32, torch.bfloat16)]
    assert steps == sorted(steps)
    assert steps[-1] < 0.1


def test_a_small_gradient_is_measured_by_larger_ones():
    exact = {"a.weight": torch.full((4,), 1.0), "a.bias": torch.full((4,), 1e-3)}
    wrong = {"a.weight": exact["a.weight"], "a.bias": exact["a.bias"] * 1.01}
    how = {"dtype": torch.float32, "depth": 1}
    alone = {each.name: each for each in compare(exact, [], wrong, **how)}
    together = {each.name: each for each in compare(exact, [], wrong, by_module=True, **how)}
    assert alone["a.bias"].error == pytest.approx(1e-2, rel=1e-3)
    assert together["a.bias"].error == pytest.approx(1e-5, rel=1e-3)
    least = {each.name: each for each in compare(exact, [], wrong, gradients=True, **how)}
    allowed = least["a.bias"].allowed
    assert allowed == pytest.approx(rounding_step(torch.float32) / 1e-3, rel=1e-3)
    assert allowed > alone["a.bias"].allowed


@pytest.mark.parametrize(
    ("noises", "shares", "expected"),
    [
        ([], [], False),
        ([0.0, 0.0, 1.0], [1.0, 1.0, 1e-6], False),
        ([0.0, 1.0, 1.0], [1e-6] * 3, True),
        ([0.0, 0.0, 1.5], [1.0, 1.0, 1.0], True),
        ([0.0, 0.0, 1.5], [1.0, 1.0, 1e-6], False),
    ],
    ids=str,
)
def test_a_baseline_is_too_noisy_by_half_or_by_a_large_tensor(noises, shares, expected):
    pairs = zip(noises, shares, strict=True)
    found = [Deviation(str(i), 0.0, 1.0, noise, share) for i, (noise, share) in enumerate(pairs)]
    assert is_too_noisy(found) is expected


class Embedded(nn.Module):
    """An embedding with sparse gradients before convolutions, and outputs of several dtypes."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(6, 4, sparse=True)
        self.body = nn.Sequential(nn.Conv2d(4, 4, 3), nn.InstanceNorm2d(4), nn.Conv2d(4, 2, 1))
        self.register_buffer("count", torch.ones(2, dtype=torch.uint16))

    def forward(self, x):
        y = self.body(self.embedding(x).permute(0, 3, 1, 2).contiguous())
        return y, torch.complex(y, y), y > 0, self.count.to(torch.int8)


def test_sparse_gradients_and_other_dtypes_are_compared():
    reference = Embedded()
    pipeline, model = prepared(reference, FLAT | {"repair_layout": {}})
    indices = torch.randint(0, 6, (2, 6, 6))
    assert verify(reference, model, indices, pipeline=pipeline, mode="train").status == "pass"
    model.embedding.weight.register_hook(lambda gradient: gradient * 1.01)
    assert verify(reference, model, indices, pipeline=pipeline, mode="train").status == "fail"
