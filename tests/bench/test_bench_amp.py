"""A bench under autocast."""

import pytest
import torch
from torch import nn

from prepare.bench import compare
from prepare.errors import RefusedError

BATCH = torch.ones(4, 3)


class Seen(nn.Module):
    """Notes the dtype of its layer's output in each call."""

    def __init__(self, note=lambda dtype: None):
        super().__init__()
        self.layer, self.note = nn.Linear(3, 3), note

    def forward(self, x):
        x = self.layer(x)
        self.note(x.dtype)
        return x


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("amp", ["bfloat16", "float16"])
def test_every_forward_is_timed_under_the_autocast(amp, train):
    seen = {"a": set(), "b": set()}
    models = {name: Seen(dtypes.add) for name, dtypes in seen.items()}
    found = compare(models, BATCH, amp=amp, train=train, budget=0.05)
    assert found.settings["amp"] == amp
    assert seen["a"] == seen["b"] == {getattr(torch, amp)}
    assert found.row("b").ratio


def test_without_amp_a_surrounding_autocast_is_off_while_timing():
    seen = set()
    with torch.autocast("cpu", torch.bfloat16):
        compare({"a": Seen(seen.add)}, BATCH, budget=0.05)
    assert seen == {torch.float32}


def test_a_float16_step_scales_the_loss_and_unscales_the_gradients(monkeypatch):
    steps = []
    unscale = torch.amp.GradScaler.unscale_

    def spied(scaler, optimizer):
        (group,) = optimizer.param_groups
        before = group["params"][0].grad.clone()
        unscale(scaler, optimizer)
        steps.append((before / group["params"][0].grad).nanmean())

    monkeypatch.setattr(torch.amp.GradScaler, "unscale_", spied)
    compare({"a": Seen()}, BATCH, amp="float16", train=True, budget=0.05)
    assert steps[-1] > 100


def test_an_unknown_amp_is_refused_before_anything_is_timed():
    with pytest.raises(RefusedError, match="amp: 'fp16' is not allowed"):
        compare({"a": Seen()}, BATCH, amp="fp16")
