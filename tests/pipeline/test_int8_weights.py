"""A model whose weights another package stored in 8 bits: read as it is, and refused by name where it must be."""

import re
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from torch import nn

from int8_weights import in_8_bits
from prepare import checkpoint
from prepare.audit import audit
from prepare.errors import CheckpointError, RefusedError
from prepare.pipeline import Pipeline, like
from prepare.registry import STEPS, register
from prepare.stages.bench import compare
from prepare.stages.verify import verify
from prepare.step import ModelStep
from prepare.testing import StepContract

IMAGE = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
FLAT = {"conv2d_memory_format": {}}
PAGE = Path(__file__).parents[2] / "docs" / "steps.md"


def network():
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 8, 3), nn.Flatten(2), nn.Linear(36, 64), nn.ReLU(), nn.Linear(64, 4))
    return nn.Sequential(*layers).eval()


class RoundedLinear(ModelStep):
    """Stores weights in 8 bits."""

    name = "rounded_linear"

    def targets(self, model):
        return [n for n, m in model.named_modules() if type(getattr(m, "weight", 0)) is nn.Parameter
                and isinstance(m, nn.Linear)]  # fmt: skip

    def act(self, model):
        in_8_bits(model)


def rounding(steps):
    return Pipeline([*Pipeline.from_config(steps).steps.values(), RoundedLinear()])


def test_a_quantized_model_is_prepared_and_its_weights_stay():
    model = in_8_bits(network())
    weight, pipeline = model[2].weight, Pipeline.from_config(FLAT)
    plan = pipeline.plan(model)
    found = audit(pipeline.apply(model), plan=plan)
    rows = {row.path: (row.dtype, row.status) for row in found.rows}
    assert rows["0.weight"] == ("float32", "converted")
    assert rows["2.weight"] == rows["4.weight"] == ("float32 with int8 data", "untouched")
    assert model[2].weight is weight
    # 216 + 8 + 64 + 4 numbers of four bytes, 2,560 of one, and 68 scales.
    assert found.summary["bytes_before"] == found.summary["bytes_after"] == 292 * 4 + 2560 + 68 * 4
    assert plan.summary()["bytes_after"] == found.summary["bytes_after"]


def test_a_step_that_stores_8_bits_leaves_the_rest_as_asked():
    pipeline, model = rounding({"half": {"dtype": "bfloat16"}, **FLAT}), network()
    plan = pipeline.plan(model)
    found = audit(pipeline.apply(model), plan=plan)
    rows = {row.path: (row.dtype, row.status) for row in found.rows}
    assert rows["2.weight"] == ("bfloat16 with int8 data", "converted")
    assert rows["2.bias"] == ("bfloat16", "converted")
    assert found.summary["bytes_before"] == (292 + 2560) * 4


def test_a_cast_of_a_quantized_weight_is_refused_by_name():
    with pytest.raises(RefusedError, match="2.weight, 4.weight: Int8Weight defines its own"):
        Pipeline.from_config({"half": {}}).apply(in_8_bits(network()))


def test_a_file_of_weights_refuses_quantized_ones_by_name(tmp_path):
    with pytest.raises(CheckpointError, match="2.weight: is no dense tensor"):
        checkpoint.save(in_8_bits(network()), tmp_path / "int8.safetensors")


def test_a_copy_with_other_classes_of_tensors_is_refused():
    pipeline, model = Pipeline.from_config(FLAT), network()
    pipeline.apply(model)
    with pytest.raises(RefusedError, match="2.weight: .*differ in name, shape or class"):
        like(in_8_bits(network()), model)


def test_equal_quantized_models_verify_and_are_timed():
    model = in_8_bits(network())
    before, pipeline = deepcopy(model), Pipeline.from_config(FLAT)
    assert verify(before, pipeline.apply(model), IMAGE, pipeline=pipeline).status == "pass"
    values = model[2].weight.rounded.clone()
    assert {row.name for row in compare({"before": before, "after": model}, IMAGE, budget=0.1).rows} == {
        "before",
        "after",
    }  # fmt: skip
    assert torch.equal(model[2].weight.rounded, values)


def test_weights_in_8_bits_are_not_called_right():
    model = network()
    found = verify(deepcopy(model), in_8_bits(model), IMAGE)
    assert (found.status, found.reason.partition(" (")[0]) == ("fail", "outputs")


def test_the_step_of_the_page_passes_the_contract(monkeypatch):
    pytest.importorskip("torchao")
    monkeypatch.setattr(STEPS, "_classes", dict(STEPS._classes))
    (code,) = [
        block
        for block in re.findall(r"```python[^\n]*\n(.*?)```", PAGE.read_text(), re.DOTALL)
        if "Int8Linear" in block
    ]
    names = {"nn": nn, "torch": torch, "register": register, "__name__": __name__}
    names |= {"ModelStep": ModelStep, "StepContract": StepContract}
    exec(code, names)
    contract = names["TestInt8Linear"]()
    contract.test_it_has_something_to_do_here()
    contract.test_every_tensor_is_as_planned()
    contract.test_only_what_the_plan_named_changes()
    contract.test_afterwards_the_plan_is_empty_and_twice_is_once()
    contract.test_a_prepared_model_can_be_copied_and_pickled()
    contract.test_the_docstring_is_a_card()
