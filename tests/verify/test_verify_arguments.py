"""Test the arguments of `verify`: batches of any form, and refusals."""

import pytest
import torch
from torch import nn

from prepare.core.forward.example_input import Example
from prepare.errors import RefusedError
from prepare.pipeline import Pipeline
from prepare.stages.verify import verify
from verify_checks import FLAT, PIPELINES, check
from verify_faults import Net


class Many(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.embedding = nn.Conv2d(3, 4, 3), nn.Embedding(7, 4)

    def forward(self, x, ids, *, scale=1.0, masks=()):
        return self.conv(x) * scale + self.embedding(ids).mean(1).view(-1, 4, 1, 1) + sum(masks)


def test_a_batch_may_be_a_tensor_a_tuple_a_mapping_or_an_example():
    x, ids = torch.randn(2, 3, 8, 8), torch.tensor([[1, 2], [3, 4]])
    named = {"x": x, "ids": ids, "scale": 2.0, "masks": [torch.rand(1)]}
    for batch in ((x, ids), named, Example((x,), {"ids": ids})):
        for precision in PIPELINES:
            assert check(Many(), PIPELINES[precision], batch, mode="train").status == "pass"
    assert check(nn.Conv2d(3, 4, 3), FLAT, x).status == "pass"


def test_a_model_is_not_verified_against_itself():
    model = Pipeline.from_config({"half": {}}).apply(Net())
    with pytest.raises(
        RefusedError, match=r"is the same object as the reference; .*copy\.deepcopy\(model\)"
    ):
        verify(model, model, torch.randn(1, 3, 8, 8))


def test_an_unknown_mode_is_refused():
    with pytest.raises(RefusedError, match="is not a mode; "):
        verify(Net(), Net(), torch.randn(1, 3, 8, 8), mode="training")
    with pytest.raises(RefusedError, match="run one forward first"):
        verify(nn.LazyConv2d(3, 3), nn.LazyConv2d(3, 3), torch.randn(1, 3, 8, 8))
