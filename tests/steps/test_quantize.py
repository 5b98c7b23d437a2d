"""The step quantize: weights of Linear modules in 8 bits, and the reason of each other weight."""

import pytest
import torch
from torch import nn

from prepare.audit import audit
from prepare.errors import ConfigError, NothingMatchesError, PatternError
from prepare.pipeline import Pipeline
from quantize_checks import NEEDS_TORCHAO, prepared, quantized, relative_error
from small_nets import perceptron

pytestmark = NEEDS_TORCHAO


def reasons(model, plan):
    """The reason for each tensor that has one."""
    return {row.path: row.reason for row in audit(model, plan=plan).rows if row.reason}


def test_weights_of_linear_modules_are_in_8_bits():
    reference = perceptron()
    model, _, pipeline = prepared()
    assert quantized(model) == ["first", "second", "third"]
    assert model.second.weight is model.third.weight
    assert model.first.weight.qdata.dtype is torch.int8
    assert 0 < relative_error(model, reference) < 0.02
    assert not pipeline.plan(model)


def test_scheme_int8_dynamic_rounds_the_inputs_as_well():
    model, _, _ = prepared(scheme="int8_dynamic")
    assert model.first.weight.act_quant_kwargs is not None
    assert prepared()[0].first.weight.act_quant_kwargs is None
    assert 0 < relative_error(model, perceptron()) < 0.02


def test_group_size_gives_each_group_a_scale():
    assert prepared()[0].first.weight.scale.shape == (128, 1)
    model, plan, _ = prepared(group_size=32)
    assert model.first.weight.scale.shape == (128, 2)
    rows = {row.path: row for row in audit(model, plan=plan).rows}
    assert rows["first.weight"].dtype == "int8 per 32 values"


def test_include_and_exclude_select_linear_modules():
    assert quantized(prepared(include=["first"])[0]) == ["first"]
    model, plan, _ = prepared(exclude=["second"])
    assert quantized(model) == ["first"]
    rows = {row.path: row for row in audit(model, plan=plan).rows}
    assert (rows["second.weight"].status, rows["second.weight"].reason) == (
        "skipped",
        "quantize: exclude: second",
    )
    assert rows["third.weight"].reason == "quantize: exclude: second (as second.weight)"


def test_the_audit_says_of_each_weight_what_it_is_and_why():
    model, plan, _ = prepared()
    rows = {row.path: row for row in audit(model, plan=plan).rows}
    first, convolution = rows["first.weight"], rows["patches.weight"]
    assert (first.dtype, first.status, first.before["dtype"]) == (
        "int8 per row",
        "converted",
        "float32",
    )
    assert (convolution.status, convolution.dtype) == ("untouched", "float32")
    only = "quantize: torchao quantizes weights of Linear only"
    assert reasons(model, plan) == {
        "patches.weight": only,
        "embedding.weight": only,
        "head.weight": f"{only} (as embedding.weight)",
    }


def test_plan_and_audit_count_the_same_bytes():
    for options in ({}, {"group_size": 16}, {"scheme": "int8_dynamic"}):
        reference = perceptron()
        model, plan, _ = prepared(reference, **options)
        summary = audit(model, plan=plan).summary
        counted = plan.summary()
        assert summary["bytes_before"] == counted["bytes_before"] == 72488
        assert summary["bytes_after"] == counted["bytes_after"] < 30000
    again = Pipeline.from_config({"quantize": {"scheme": "int8_dynamic"}}).plan(model).summary()
    assert again["bytes_before"] == again["bytes_after"] == counted["bytes_after"]


def test_an_audit_finds_a_weight_that_is_float_again():
    model, plan, pipeline = prepared()
    model.first.weight = nn.Parameter(perceptron().first.weight.detach())
    rows = {row.path: row for row in audit(model, plan=plan).rows}
    assert rows["first.weight"].status == "ineffective"
    assert rows["first.weight"].reason == "dtype is float32, not int8 per row"
    assert any("int8 per row" in str(drift) for drift in pipeline.check(model))


def test_the_guard_finds_a_weight_that_is_float_again():
    model, _, pipeline = prepared()
    guard = pipeline.guard(model)
    guard()
    model.first.weight = nn.Parameter(perceptron().first.weight.detach())
    assert [str(drift) for drift in guard.find_drift()] == [
        "first.weight: dtype is float32, prepared as int8 per row"
    ]


class Scaled(nn.Linear):
    """A Linear with a forward of its own."""

    def forward(self, x):
        return super().forward(x) * 2


def without_rows(columns, rows):
    """A Linear without rows; torch warns where it draws no values."""
    module = nn.Linear(columns, rows)
    module.weight = nn.Parameter(torch.empty(0, columns))
    return module


@pytest.mark.parametrize(
    ("module", "options", "reason"),
    [
        (Scaled(8, 8), {}, "Scaled has a forward of its own"),
        (nn.Linear(8, 8).double(), {}, "torchao quantizes no float64"),
        (nn.Linear(10, 8), {"group_size": 4}, "group_size 4 does not divide its 10 columns"),
        (without_rows(8, 8), {}, "holds no values"),
        (nn.Embedding(8, 8), {}, "torchao quantizes weights of Linear only"),
        (
            nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)),
            {},
            "ParametrizedLinear computes its weight from it",
        ),
        (nn.MultiheadAttention(8, 2).out_proj, {}, "MultiheadAttention reads it itself"),
    ],
)
def test_a_weight_that_stays_has_a_reason(module, options, reason):
    model = nn.Sequential(nn.Linear(8, 8), module).eval()
    model, plan, _ = prepared(model, **options)
    assert quantized(model) == ["0"]
    assert f"quantize: {reason}" in reasons(model, plan).values()


def test_odd_sizes_stay_in_float_where_cublas_would_refuse_them():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 10)).eval()
    steps = {"device": {"device": "cuda"}, "quantize": {"scheme": "int8_dynamic"}}
    plan = Pipeline.from_config(steps).plan(model)
    left = {t.path: t.left for t in plan.tensors if t.left}
    assert left == {
        "1.weight": {
            "quantize": "cuBLAS needs multiples of 8 as sizes, and torchao would use the CPU"
        }
    }


def test_a_weight_quantized_in_another_way_is_named():
    model, _, _ = prepared()
    wrong = r"quantizes no weight of Perceptron"
    with pytest.raises(NothingMatchesError, match=wrong):
        prepared(model, group_size=32)
    plan = Pipeline.from_config({"quantize": {"group_size": 32}}).plan(model)
    left = {t.path: t.left["quantize"] for t in plan.tensors if t.left}
    assert left["first.weight"] == "is int8 per row already, and not int8 per 32 values"


def test_a_model_without_linear_modules_is_an_error():
    with pytest.raises(NothingMatchesError) as caught:
        prepared(nn.Sequential(nn.Conv2d(3, 8, 3)).eval())
    only = "torchao quantizes weights of Linear only"
    assert str(caught.value) == f"steps.quantize: quantizes no weight of Sequential: {only}"
    with pytest.raises(NothingMatchesError, match="no weight of Sequential: it has none"):
        prepared(nn.Sequential().eval())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"scheme": "int8_dynamc"},
            "steps.quantize.scheme: 'int8_dynamc' is not a scheme; did you mean 'int8_dynamic'?",
        ),
        ({"schem": "int8_dynamic"}, "steps.quantize.schem: no such option; did you mean 'scheme'?"),
        (
            {"scheme": "int8_static"},
            "steps.quantize.scheme: 'int8_static' is not a scheme; PT2E quantizes an exported program",
        ),
        (
            {"group_size": 0},
            "steps.quantize.group_size: 0 is not a number of values; give one from 1 on, as in 32",
        ),
        (
            {"group_size": 32, "scheme": "int8_dynamic"},
            "steps.quantize.group_size: is for int8_weight_only: integers are multiplied along whole "
            "rows; drop one of the two",
        ),
    ],
)
def test_a_wrong_option_is_one_clear_line(options, message):
    with pytest.raises(ConfigError) as caught:
        Pipeline.from_config({"quantize": options})
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("option", ["include", "exclude"])
def test_a_pattern_that_matches_nothing_names_the_nearest(option):
    with pytest.raises(PatternError) as caught:
        prepared(**{option: ["frist"]})
    message = f"steps.quantize.{option}: 'frist' matches no Linear; did you mean 'first'?"
    assert str(caught.value) == message
