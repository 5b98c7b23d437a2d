"""A small model in 8 bits, and its error."""

from importlib.util import find_spec

import pytest
import torch

from prepare.core.model.quantized import quantized_weight
from prepare.pipeline import Pipeline
from small_nets import perceptron

NEEDS_TORCHAO = pytest.mark.skipif(find_spec("torchao") is None, reason="needs torchao")
IMAGE = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def prepared(model=None, *, strict=True, steps=None, **options):
    """The network with weights in 8 bits, and its plan."""
    model = perceptron() if model is None else model
    pipeline = Pipeline.from_config({**(steps or {}), "quantize": options})
    plan = pipeline.plan(model)
    return pipeline.apply(model, strict=strict), plan, pipeline


def quantized(model):
    """The names of the modules whose weights are quantized."""
    return [name for name, m in model.named_modules() if quantized_weight(m) is not None]


def relative_error(model, reference):
    with torch.no_grad():
        exact = reference(IMAGE)
        return float((model(IMAGE) - exact).abs().max() / exact.abs().max())
