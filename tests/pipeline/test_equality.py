"""Prepared networks equal, stride for stride and bit for bit, what torch's own calls make of them."""

import pytest
import torch
from torch.nn.utils import convert_conv2d_weight_memory_format, convert_conv3d_weight_memory_format

from prepare.pipeline import Pipeline
from small_nets import build, clone, model_configs, same


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
