"""A model whose weights another package stored in 8 bits: read as it is, and refused by name where it must be."""

import pytest
import torch
from torch import nn

from int8_weights import in_8_bits
from prepare.audit import audit
from prepare.errors import RefusedError
from prepare.pipeline import Pipeline

IMAGE = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
FLAT = {"conv2d_memory_format": {}}


def network():
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 8, 3), nn.Flatten(2), nn.Linear(36, 64), nn.ReLU(), nn.Linear(64, 4))
    return nn.Sequential(*layers).eval()


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


def test_a_cast_of_a_quantized_weight_is_refused_by_name():
    with pytest.raises(RefusedError, match="2.weight, 4.weight: Int8Weight defines its own"):
        Pipeline.from_config({"half": {}}).apply(in_8_bits(network()))
