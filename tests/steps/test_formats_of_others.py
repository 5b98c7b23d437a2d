"""A third party's step that requests a memory format counts as the built-in ones do."""

import pytest
import torch
from torch import nn

from prepare.audit import audit
from prepare.pipeline import Pipeline
from prepare.registry import STEPS
from prepare.step import TensorStep, Want


class EncoderLast(TensorStep):
    """Has no option, and wants nothing of a weight without a name."""

    def want(self, tensor):
        last = tensor.module_name.startswith("encoder") and tensor.tensor.dim() == 4
        return Want(memory_format=torch.channels_last) if last else None


class AllLast(TensorStep):
    """Wants the same of every weight of four dimensions."""

    exact: bool = True

    def want(self, tensor):
        return Want(memory_format="channels_last") if tensor.tensor.dim() == 4 else None


@pytest.fixture(autouse=True)
def registry(monkeypatch):
    monkeypatch.setattr(STEPS, "_classes", {name: STEPS[name] for name in STEPS})
    STEPS.register("all_last", AllLast)
    STEPS.register("encoder_last", EncoderLast)


def network(name="encoder"):
    parts = [nn.Conv2d(3, 8, 3), nn.InstanceNorm2d(8), nn.SiLU(), nn.Conv2d(8, 4, 3)]
    return nn.ModuleDict({name: nn.Sequential(*parts)})


@pytest.mark.parametrize("step", ["all_last", "encoder_last"])
def test_other_steps_follow_its_format(step):
    model = network()
    Pipeline.from_config({step: {}, "repair_layout": {}}).apply(model)
    assert type(model["encoder"][1]).__name__ == "KeepingInstanceNorm2d"


def test_inputs_follow_its_format():
    pipeline = Pipeline.from_config({"all_last": {}, "input_format": {}})
    x = torch.ones(2, 3, 8, 8)
    assert pipeline.format(x).stride() == x.to(memory_format=torch.channels_last).stride()


def test_an_audit_says_which_steps_asked_for_formats():
    model, pipeline = network(), Pipeline.from_config({"encoder_last": {}, "half": {}})
    plan = pipeline.plan(model.eval(), known_issues="ignore")
    assert audit(pipeline.apply(model, known_issues="ignore"), plan).summary["format_steps"] == [
        "encoder_last"
    ]
    assert audit(model).summary["format_steps"] == []
