"""Models and machines where quantize is refused, and its order among other steps."""

import copy
import importlib.util
import logging
import warnings

import pytest
import torch
from torch import nn

from prepare.errors import RefusedError
from prepare.pipeline import Pipeline, like
from prepare.steps import quantize
from quantize_checks import IMAGE, NEEDS_TORCHAO, prepared, quantized, relative_error
from small_nets import perceptron

pytestmark = NEEDS_TORCHAO


def test_a_model_in_training_mode_is_refused():
    model = perceptron().train()
    with pytest.raises(RefusedError) as caught:
        prepared(model)
    assert str(caught.value) == (
        "steps.quantize: is for inference: weights in 8 bits cannot be trained; "
        'call model.eval() first, or drop it with "quantize": None'
    )
    assert not quantized(model)


def test_an_optimizer_of_quantized_weights_is_refused():
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters())
    wrong = "optimizer: holds first.weight and 1 more, which a step replaces with new parameters"
    with pytest.raises(RefusedError, match=wrong):
        Pipeline.from_config({"quantize": {}}).apply(model, optimizer=optimizer)
    assert not quantized(model)


def test_without_torchao_one_line_names_the_extra(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(quantize, "find_spec", lambda n: None if n == "torchao" else find(n))
    with pytest.raises(RefusedError) as caught:
        prepared()
    assert str(caught.value) == (
        "steps.quantize: needs the package torchao, which is not installed; "
        "install the extra: pip install 'torch-prepare[quantize]'"
    )


def test_layout_and_precision_come_first_in_any_order():
    first = {"conv2d_memory_format": {}, "half": {"dtype": "bfloat16"}, "input_format": {}}
    models = [
        Pipeline.from_config(steps).apply(perceptron())
        for steps in ({**first, "quantize": {}}, {"quantize": {}, **first})
    ]
    for model in models:
        assert model.patches.weight.is_contiguous(memory_format=torch.channels_last)
        assert (model.first.weight.dtype, model.first.bias.dtype) == (torch.bfloat16,) * 2
        assert torch.equal(model.first.weight.qdata, models[0].first.weight.qdata)
    output = models[0](IMAGE.bfloat16())
    assert output.dtype is torch.bfloat16


def test_a_cast_of_quantized_weights_is_refused():
    model, _, _ = prepared()
    with pytest.raises(RefusedError, match="prepare before sharding or quantizing"):
        Pipeline.from_config({"half": {"dtype": "bfloat16"}}).apply(model)


def test_norms_are_fused_before_weights_are_quantized():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(288, 4))
    reference = copy.deepcopy(model.eval())
    model, _, _ = prepared(model, steps={"fuse_conv_bn": {}})
    assert isinstance(model[1], nn.Identity)
    assert relative_error(model, reference) < 0.02


def test_quantizing_changes_no_setting_of_inductor_or_logging(caplog):
    from torch._inductor import config

    before = config.coordinate_descent_tuning, config.force_fuse_int_mm_with_mul
    with warnings.catch_warnings(record=True) as caught, caplog.at_level(logging.DEBUG):
        warnings.simplefilter("always")
        prepared()
    assert (config.coordinate_descent_tuning, config.force_fuse_int_mm_with_mul) == before
    assert not caught
    assert logging.root.manager.disable == logging.NOTSET


def test_a_cpu_without_vnni_gets_one_bit_less(monkeypatch):
    from torchao import utils

    monkeypatch.setattr(utils, "_cpu_is_vnni_supported", lambda: False)
    model, _, _ = prepared(scheme="int8_dynamic")
    assert int(model.first.weight.qdata.abs().max()) <= 64
    assert relative_error(model, perceptron()) < 0.04


def test_a_model_without_values_is_refused():
    with torch.device("meta"):
        model = perceptron()
    assert Pipeline.from_config({"quantize": {}}).plan(model).summary()["to_change"] == 2
    with pytest.raises(RefusedError) as caught:
        prepared(model)
    assert str(caught.value) == (
        "first.weight: meta holds no data to quantize; "
        "load the weights first, with prepare.checkpoint.load(path, model)"
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_is_refused(value):
    model = perceptron()
    model.second.weight.data[3, 4] = value
    with pytest.raises(RefusedError) as caught:
        prepared(model)
    assert str(caught.value) == (
        "second.weight: holds NaN or infinity, which would make NaN of all values with the same scale; "
        '"quantize": {"exclude": ["second"]}'
    )
    assert not quantized(model)


def test_a_float_copy_does_not_take_the_layout_of_8_bits():
    model, _, _ = prepared()
    for copied, reference in ((perceptron(), model), (model, perceptron())):
        wrong = (
            "first.weight: is in 8 bits in one of the two models only; give the copy the same steps"
        )
        with pytest.raises(RefusedError, match=wrong):
            like(copied, reference)
