"""Every registered step passes the contract, and every built-in step has a YAML with all its options."""

import pytest
import torch
import yaml

from keeping_nets import chunked
from paths import CONF
from prepare.core.utils.machine import accelerator
from prepare.pipeline import Pipeline
from prepare.registry import STEPS
from prepare.step import Step
from prepare.testing import StepContract
from small_nets import mixed

NAMES = list(STEPS)
# Settings with which a step has something to do, if its defaults change nothing in the network.
SPECIAL = {
    "backends": {"options": {"cudnn_benchmark": True}},
    "compile": {"options": {"backend": "eager"}},
    "eval_mode": {"model": lambda self: mixed().train()},
    "fuse_conv_bn": {"keeps_parameters": False},
    "input_format": {"options": {"memory_format": "by_rank", "attach": True}},
    "keep_layout": {"model": lambda self: chunked()},
    "repair_layout": {"options": {"force": True}},
    "rewrite_conv": {"options": {"force": True}},
}


def contract(name: str) -> type[StepContract]:
    """The tests of one step."""
    members = {"step": name, "__module__": __name__, **SPECIAL.get(name, {})}
    return type(f"Test_{name}", (StepContract,), members)


globals().update({f"Test_{name}": contract(name) for name in NAMES})


class Test_device(StepContract):
    """The step has nothing to do on a machine with only a CPU."""

    step = "device"

    @pytest.mark.skipif(accelerator()["backend"] == "cpu", reason="needs an accelerator")
    def test_it_has_something_to_do_here(self):
        super().test_it_has_something_to_do_here()


def test_a_step_has_at_most_nine_public_members():
    assert len([name for name in vars(Step) if not name.startswith("_")]) <= 9


def test_the_device_cpu_0_is_the_cpu():
    pipeline = Pipeline.from_config({"device": {"device": "cpu:0"}, "half": {}})
    model = pipeline.apply(mixed())
    assert {tensor.device for tensor in model.parameters()} == {torch.device("cpu")}


class Test_half_that_keeps_modules(StepContract):
    """The step installs hooks on modules that stay in float32."""

    step = "half"
    options = {"keep": ["norms", "flat", "deep.2", "tied.head"]}


@pytest.mark.parametrize("name", NAMES)
def test_the_yaml_spells_out_every_field_with_its_default(name):
    written = yaml.safe_load((CONF / "steps" / f"{name}.yaml").read_text())
    assert written == {name: STEPS[name]().to_options()}
