"""Drift of a prepared model is found, and a copy gets the layout of its reference."""

import copy

import pytest
import torch
from torch import nn
from torch.optim import swa_utils

from prepare.errors import DriftError
from prepare.pipeline import Pipeline, like

PIPELINE = Pipeline.from_config({"half": {"dtype": "bfloat16"}, "conv2d_memory_format": {}})


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Sequential(nn.Conv2d(8, 4, 1)))


def prepared():
    return PIPELINE.apply(make())


def facts(model):
    return {name: (t.stride(), t.dtype) for name, t in model.state_dict().items()}


def assign_a_checkpoint(model):
    model.load_state_dict(make().state_dict(), assign=True)


def swap_weights_as_an_average_does(model):
    for parameter, other in zip(model.parameters(), make().parameters(), strict=True):
        parameter.data = other.data


def cast_one_module_again(model):
    model[2].float()


DRIFTS = {
    assign_a_checkpoint: {"0.weight", "0.bias", "2.0.weight", "2.0.bias"},
    swap_weights_as_an_average_does: {"0.weight", "0.bias", "2.0.weight", "2.0.bias"},
    cast_one_module_again: {"2.0.weight", "2.0.bias"},
}


@pytest.mark.parametrize("drift", DRIFTS, ids=lambda drift: drift.__name__)
def test_check_lists_drift_and_raises_it_with_strict(drift):
    model = prepared()
    drift(model)
    assert {found.where for found in PIPELINE.check(model)} == DRIFTS[drift]
    with pytest.raises(DriftError, match=r"0\.weight[\s\S]*apply the pipeline again"):
        PIPELINE.check(model, strict=True)
    PIPELINE.apply(model)
    assert PIPELINE.check(model) == []


def test_like_gives_an_earlier_copy_the_layout_and_keeps_its_values():
    model = make()
    average = copy.deepcopy(model)
    PIPELINE.apply(model)
    parameters = list(average.parameters())
    assert like(average, model) is average
    assert facts(average) == facts(model)
    assert all(a is b for a, b in zip(average.parameters(), parameters, strict=True))
    assert torch.equal(average[0].weight, make()[0].weight.bfloat16())
    assert PIPELINE.check(average) == []


LAYOUT = Pipeline.from_config({"conv2d_memory_format": {}})


def averaged(model, kind):
    update = swa_utils.get_ema_multi_avg_fn(0.9) if kind == "exponential" else None
    return swa_utils.AveragedModel(model, multi_avg_fn=update, use_buffers=kind == "exponential")


def trained(model, average, *, steps):
    """Train for a few steps, and average after each."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(steps)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(2, 3, 8, 8, dtype=torch.float64)).square().mean().backward()
        optimizer.step()
        average.update_parameters(model)
    optimizer.zero_grad()


@pytest.mark.parametrize("kind", ["exponential", "equal"])
@pytest.mark.parametrize("copied", ["before", "after"])
def test_an_averaged_model_keeps_its_layout_and_goes_on_averaging(kind, copied):
    reference = make().double()
    other = averaged(reference, kind)
    trained(reference, other, steps=2)
    model = make().double()
    average = averaged(model, kind)
    trained(model, average, steps=2)
    if copied == "before":
        LAYOUT.apply(model)
        assert LAYOUT.check(average.module)
        assert like(average, model) is average
    else:
        average = copy.deepcopy(average)
        LAYOUT.apply(model)
        LAYOUT.apply(average.module)
    assert facts(average.module) == facts(model)
    for each, its_average in ((reference, other), (model, average)):
        trained(each, its_average, steps=3)
    assert LAYOUT.check(model) == LAYOUT.check(average.module) == []
    assert average.n_averaged == other.n_averaged
    for one, two in zip(
        average.module.state_dict().values(), other.module.state_dict().values(), strict=True
    ):
        assert torch.allclose(one, two, rtol=0, atol=1e-12)


class Doubling(nn.Module):
    """Joins channels in its own code, for `keep_layout`."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)

    def forward(self, x):
        x = self.conv(x)
        return torch.cat([x, x], 1)


EVERYTHING = {
    "eval_mode": {"include": ["norms"]},
    "repair_layout": {"force": True},
    "keep_layout": {},
    "half": {"dtype": "bfloat16", "keep": ["norms", "1.conv"]},
    "conv2d_memory_format": {},
    "compile": {"backend": "eager"},
    "input_format": {"attach": True},
}


def test_like_does_in_a_copy_what_every_step_has_done():
    pipeline = Pipeline.from_config(EVERYTHING)
    model = nn.Sequential(nn.Conv2d(3, 3, 1), Doubling(), nn.InstanceNorm2d(16), nn.BatchNorm2d(16))
    average = swa_utils.AveragedModel(model, use_buffers=True)
    pipeline.apply(model)
    assert {drift.wanted for drift in pipeline.check(average.module)} >= EVERYTHING.keys() - {
        "conv2d_memory_format"
    }
    like(average, model)
    assert pipeline.check(average.module) == []
    x = torch.randn(2, 3, 8, 8)
    assert torch.equal(average(x), model(x))
    average.update_parameters(model)
    assert pipeline.check(average.module) == []
