"""Verification of weights in 8 bits: the tolerance is that of 8 bits, and faults are found all the same."""

import pytest
import torch
from torch import nn

from prepare.core.model.quantized import rounded_inputs, rounded_like
from prepare.errors import RefusedError
from prepare.pipeline import Pipeline
from prepare.stages.verify import verify
from quantize_checks import NEEDS_TORCHAO
from small_nets import perceptron

pytestmark = NEEDS_TORCHAO

IMAGE = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
HALF = {"half": {"dtype": "bfloat16"}, "input_format": {"attach": True}}


def quantized(steps=None, **options):
    pipeline = Pipeline.from_config({**(steps or {}), "quantize": options})
    return pipeline.apply(perceptron()), pipeline


def checked(model, pipeline=None, **keywords):
    found = verify(perceptron(), model, IMAGE, pipeline=pipeline, **keywords)
    return found, {check.what: check for check in found.checks}


@pytest.mark.parametrize(
    ("steps", "options"),
    [
        ({}, {}),
        ({}, {"group_size": 16}),
        ({}, {"scheme": "int8_dynamic"}),
        (HALF, {}),
        (HALF, {"scheme": "int8_dynamic"}),
        ({"conv2d_memory_format": {}}, {"exclude": ["second"]}),
    ],
)
def test_a_quantized_model_passes_within_the_error_of_8_bits(steps, options):
    found, checks = checked(*quantized(steps, **options))
    assert found.status == "pass", found.reason
    outputs = checks["outputs"]
    assert 1e-4 < outputs.error < outputs.allowed < 0.1


def test_gradients_of_a_quantized_model_are_not_compared():
    _, checks = checked(*quantized())
    for kind in ("input gradients", "parameter gradients"):
        assert checks[kind].status == "skipped"
        assert checks[kind].note == "not compared: weights in 8 bits are for inference"


def test_modules_alone_are_compared_with_the_weights_that_they_have():
    found, checks = checked(*quantized())
    assert checks["module outputs"].compared == 6
    assert found.sensitivity("outputs")[0] < 1e-3
    _, checks = checked(*quantized(scheme="int8_dynamic"))
    assert "first first: it rounds its inputs to int8" in checks["module outputs"].note


def test_a_quantized_model_is_not_verified_for_training():
    model, pipeline = quantized()
    with pytest.raises(RefusedError) as caught:
        verify(perceptron(), model, IMAGE, pipeline=pipeline, mode="train")
    assert str(caught.value) == (
        'mode: the prepared model has weights in 8 bits, which cannot be trained; mode="eval"'
    )


def scale_of_a_row(model):
    model.first.weight.scale[5] *= 1.02


def values_of_a_row(model):
    model.second.weight.qdata[7] = model.second.weight.qdata[7].roll(1)


def one_value(model):
    model.first.weight.qdata[2, 2] += 2


def bias(model):
    model.first.bias[0] += 1e-3


def rows_of_another_weight(model):
    model.first.weight = nn.Parameter(model.first.weight.detach(), requires_grad=False)
    model.first.weight.qdata.copy_(model.first.weight.qdata.flip(0))


STORED = [scale_of_a_row, values_of_a_row, one_value, bias, rows_of_another_weight]


@pytest.mark.parametrize("plant", STORED)
@pytest.mark.parametrize("scheme", ["int8_weight_only", "int8_dynamic"])
def test_a_fault_in_what_is_stored_fails(plant, scheme):
    model, pipeline = quantized(scheme=scheme)
    with torch.no_grad():
        plant(model)
    found, checks = checked(model, pipeline)
    assert (found.status, checks["values"].status) == ("fail", "fail")


def test_a_fault_of_a_kernel_that_8_bits_would_hide_fails():
    model, pipeline = quantized()
    forward = model.first.forward
    model.first.forward = lambda x: forward(x) * 1.001
    found, checks = checked(model, pipeline)
    assert found.status == "fail"
    assert (checks["outputs"].status, checks["module outputs"].status) == ("pass", "fail")
    assert checks["module outputs"].worst == "first"


def test_a_large_fault_behind_rounded_inputs_fails():
    model, pipeline = quantized(scheme="int8_dynamic")
    forward = model.first.forward
    model.first.forward = lambda x: forward(x) * 1.2
    found, checks = checked(model, pipeline)
    assert (found.status, checks["outputs"].status) == ("fail", "fail")


def test_a_model_quantized_by_torchao_is_verified():
    from torchao.quantization import Int8WeightOnlyConfig, PerTensor, quantize_

    for granularity in ({}, {"granularity": PerTensor()}):
        model = perceptron()
        quantize_(model.first, Int8WeightOnlyConfig(set_inductor_config=False, **granularity))
        found, checks = checked(model)
        assert (found.status, checks["outputs"].status) == ("pass", "pass")


def test_a_metric_decides_for_8_bits():
    exact = perceptron()(IMAGE)

    def closeness(model, batch):
        return -(model(batch) - exact).abs().max()

    model, pipeline = quantized()
    for max_drop, status in ((1.0, "pass"), (1e-6, "fail")):
        found, _ = checked(model, pipeline, metric=closeness, max_drop=max_drop)
        assert found.status == status


@pytest.mark.parametrize("group_size", [None, 32])
def test_our_rounding_is_as_far_off_as_that_of_torchao(group_size):
    model, _ = quantized(group_size=group_size)
    exact, weight = perceptron().first.weight.detach(), model.first.weight
    errors = [
        float((values - exact).abs().max())
        for values in (rounded_like(exact, weight), weight.dequantize())
    ]
    assert errors[0] > 0
    assert 0.8 < errors[0] / errors[1] < 1.2


def test_inputs_are_rounded_by_rows():
    model, _ = quantized(scheme="int8_dynamic")
    x = torch.tensor([[1.0, 0.5, 0.0], [1000.0, 2.0, 0.0]])
    rounded = rounded_inputs(x, model.first.weight)
    assert (rounded - x).abs().amax(1).tolist() == pytest.approx([0.5 / 127, 2.0])
