"""Tensors that a module protects from a cast, and values beyond float16."""

import torch
from torch import nn

from awkward_checks import HALF, apply, refused
from prepare.audit import audit
from prepare.pipeline import Pipeline


class Statistics(nn.Module):
    """Keeps its statistics in float32, whatever is asked of it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("mean", torch.zeros(3))

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        self.mean = self.mean.float()
        return self


class Stubborn(nn.Linear):
    def half(self):
        return self

    def to(self, *args, **kwargs):
        return self


def test_a_tensor_that_module_code_protects_is_kept_and_named():
    model = nn.Sequential(Statistics(), Stubborn(2, 2), nn.Linear(2, 2))
    pipeline = Pipeline.from_config(HALF)
    plan = pipeline.plan(model)
    pipeline.apply(model)
    assert model[0].mean.dtype is torch.float32
    assert model[0].weight.dtype is torch.float16
    assert model[1].weight.dtype is torch.float32
    assert model[2].weight.dtype is torch.float16
    rows = {row.path: row for row in audit(model, plan=plan).rows}
    assert (rows["0.mean"].status, rows["0.mean"].reason) == (
        "skipped",
        "half: Statistics._apply keeps it in float32",
    )
    assert rows["1.weight"].status == "skipped"
    assert rows["0.weight"].status == "converted"
    assert not pipeline.plan(model)


def test_protection_holds_for_every_parameter_of_a_storage():
    class Keeper(nn.Linear):
        def _apply(self, fn, recurse=True):
            bias = self.bias.data
            super()._apply(fn, recurse)
            self.bias.data = bias
            return self

    model = nn.Sequential(Keeper(2, 3), nn.Linear(2, 3))
    model[1].bias = nn.Parameter(model[0].bias.data)
    apply(model, HALF)
    assert model[0].bias.dtype is model[1].bias.dtype is torch.float32
    assert model[1].weight.dtype is torch.float16


def test_an_override_that_forbids_the_cast_is_refused_and_quoted():
    class Quantized(nn.Linear):
        def half(self):
            raise ValueError("half is not supported for quantized models")

    said = refused(nn.Sequential(Quantized(2, 2)), HALF)
    assert "0: its own half() raises ValueError: half is not supported for quantized models" in said
