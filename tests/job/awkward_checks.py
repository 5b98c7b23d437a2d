"""Pipelines, and short cuts that apply them or read their refusal."""

import pytest
from torch import nn

from prepare.errors import RefusedError
from prepare.pipeline import Pipeline
from small_nets import facts

FLAT = {"conv2d_memory_format": {}}
HALF = {"half": {"keep": []}}
ALL = {**HALF, **FLAT, "conv3d_memory_format": {}}


def apply(model, steps=ALL, **options):
    return Pipeline.from_config(steps).apply(model, **options)


def refused(model, steps=ALL, **options):
    before = facts(model)
    with pytest.raises(RefusedError) as caught:
        apply(model, steps, strict=False, **options)
    assert facts(model) == before
    return str(caught.value)


def with_weight(weight):
    conv = nn.Conv2d(4, 6, 3)
    conv.weight = nn.Parameter(weight)
    return conv
