"""All runs draw the same random numbers in every dtype, and dropout is off."""

import pytest
import torch
from torch import nn

from prepare.stages.verify import verify
from verify_checks import FIXED, FLAT, Draws, check, prepared


@pytest.mark.parametrize("mode", ["eval", "train"])
@pytest.mark.parametrize("draw", FIXED)
def test_both_models_draw_the_same_random_numbers(draw, mode):
    reference, batch = Draws(FIXED[draw]), torch.randn(2, 3, 8, 8)
    pipeline, model = prepared(reference, FLAT)
    result = verify(reference, model, batch, pipeline=pipeline, mode=mode)
    assert (result.status, result.reason) == ("pass", "")
    model.last.register_forward_hook(lambda _module, _args, out: out + 1e-3)
    result = verify(reference, model, batch, pipeline=pipeline, mode=mode)
    assert (result.status, result.reference, result.culprit) == ("fail", "float64", "last")


def test_a_fault_is_found_despite_random_numbers():
    model, batch = Draws(FIXED["randn_like"]), torch.randn(2, 3, 8, 8)
    pipeline, changed = prepared(model, FLAT)
    with torch.no_grad():
        changed.last.weight[0, 0, 0, 0] += 0.1
    assert verify(model, changed, batch, pipeline=pipeline).status == "fail"


OWN = torch.Generator()
NOT_FIXED = {
    "a generator of its own": lambda x: x + torch.randn(x.shape, generator=OWN, dtype=x.dtype),
    "multinomial": lambda x: x * (1 + torch.multinomial(torch.ones(1000), 1)),
}


@pytest.mark.parametrize("draw", NOT_FIXED)
def test_random_numbers_that_cannot_be_fixed_are_cannot_tell(draw):
    result = check(Draws(NOT_FIXED[draw]), FLAT, torch.randn(2, 3, 8, 8))
    assert result.status == "cannot tell"
    assert "cannot be fixed" in result.reason


def test_dropout_is_off_in_modules_functions_and_attention():
    class Drops(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.drop = nn.Conv2d(3, 4, 3), nn.Dropout2d(0.5)
            self.attention = nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True)

        def forward(self, x):
            x = nn.functional.dropout(self.drop(self.conv(x)), 0.5, self.training)
            x = x.flatten(2).transpose(1, 2)
            return self.attention(x, x, x)[0]

    assert check(Drops(), FLAT, torch.randn(2, 3, 8, 8), mode="train").status == "pass"
