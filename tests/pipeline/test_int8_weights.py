"""A model whose weights another package stored in 8 bits: read as it is, and refused by name where it must be."""

import pytest
import torch
from torch import nn

from int8_weights import in_8_bits
from prepare.errors import RefusedError
from prepare.pipeline import Pipeline

IMAGE = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
FLAT = {"conv2d_memory_format": {}}


def network():
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 8, 3), nn.Flatten(2), nn.Linear(36, 64), nn.ReLU(), nn.Linear(64, 4))
    return nn.Sequential(*layers).eval()


def test_a_cast_of_a_quantized_weight_is_refused_by_name():
    with pytest.raises(RefusedError, match="2.weight, 4.weight: Int8Weight defines its own"):
        Pipeline.from_config({"half": {}}).apply(in_8_bits(network()))
