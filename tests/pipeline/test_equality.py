"""Prepared networks equal, stride for stride and bit for bit, what torch's own calls make of them."""

import pytest
import torch
from torch.nn.utils import convert_conv2d_weight_memory_format, convert_conv3d_weight_memory_format

from prepare.pipeline import Pipeline
from small_nets import build, clone, mixed, model_configs, same


def upstream(model, *, dtype=None, flat=None, deep=None):
    """The four lines that everybody writes."""
    if dtype is not None:
        model = model.half() if dtype is torch.float16 else model.bfloat16()
    if flat is not None:
        convert_conv2d_weight_memory_format(model, flat)
    if deep is not None:
        convert_conv3d_weight_memory_format(model, deep)
    return model


BY_RANK = {"conv2d_memory_format": {}, "conv3d_memory_format": {}}


def a_third(first: int) -> list:
    """Return all models; the quick tier has every third one."""
    return [
        pytest.param(name, marks=[pytest.mark.slow] * ((first + number) % 3 > 0))
        for number, name in enumerate(model_configs())
    ]


@pytest.mark.parametrize("name", a_third(0))
@pytest.mark.parametrize(
    "dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.slow)]
)
def test_half_and_both_formats_equal_torchs_own_calls(name, dtype):
    model = build(name)
    reference = upstream(
        clone(model), dtype=dtype, flat=torch.channels_last, deep=torch.channels_last_3d
    )
    steps = {"half": {"dtype": dtype, "keep": []}, **BY_RANK}
    same(Pipeline.from_config(steps).apply(model, strict=False, known_issues="ignore"), reference)


@pytest.mark.parametrize("name", a_third(1))
def test_a_round_trip_equals_torchs_own_calls(name):
    model = build(name)
    start = clone(model)
    there = Pipeline.from_config(BY_RANK)
    back = {step: {"memory_format": "contiguous"} for step in BY_RANK}
    same(
        there.apply(model, strict=False, known_issues="ignore"),
        upstream(clone(start), flat=torch.channels_last, deep=torch.channels_last_3d),
    )
    reference = upstream(start, flat=torch.contiguous_format, deep=torch.contiguous_format)
    same(Pipeline.from_config(back).apply(model, strict=False, known_issues="ignore"), reference)


@pytest.mark.parametrize("step", ["conv2d_memory_format", "conv3d_memory_format"])
def test_one_format_alone_equals_its_converter(step):
    model = mixed()
    reference = clone(model)
    if step.startswith("conv2d"):
        convert_conv2d_weight_memory_format(reference, torch.channels_last)
    else:
        convert_conv3d_weight_memory_format(reference, torch.channels_last_3d)
    same(Pipeline.from_config({step: {}}).apply(model, known_issues="ignore"), reference)


@pytest.mark.parametrize(
    "order", [["half", "conv2d_memory_format"], ["conv2d_memory_format", "half"]]
)
def test_the_order_of_tensor_steps_makes_no_difference(order):
    options = {"half": {"keep": []}, "conv2d_memory_format": {}}
    model, reference = mixed(), None
    reference = upstream(clone(model), dtype=torch.float16, flat=torch.channels_last)
    same(
        Pipeline.from_config({name: options[name] for name in order}).apply(
            model, known_issues="ignore"
        ),
        reference,
    )


def test_ambiguous_weights_make_the_round_trip_with_exact_strides():
    for shape in [(16, 8, 1, 1), (1, 1, 1, 1), (8, 1, 3, 3)]:
        model = torch.nn.Conv2d(shape[1], shape[0], shape[2:])
        start = model.weight.stride()
        Pipeline.from_config({"conv2d_memory_format": {}}).apply(model, known_issues="ignore")
        wanted = torch.empty(shape, memory_format=torch.channels_last, device="meta").stride()
        assert model.weight.stride() == wanted
        Pipeline.from_config({"conv2d_memory_format": {"memory_format": "contiguous"}}).apply(
            model, known_issues="ignore"
        )
        assert model.weight.stride() == start
