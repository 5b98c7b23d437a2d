"""Calls of a bench: restored models, training steps, autocast, and the inputs of each variant."""

import pytest
import torch
from torch import nn

from clocks import Clock
from prepare.stages.bench import compare
from small_nets import bits

BATCH = torch.ones(4, 3)


def test_training_runs_forward_and_backward_with_random_gradients():
    seen = []

    class Net(nn.Linear):
        def forward(self, x):
            seen.append((self.training, torch.is_grad_enabled(), self.weight.grad is None))
            return super().forward(x)

    model, gradients = Net(3, 3), []
    model.weight.register_hook(gradients.append)
    compare({"a": model}, BATCH, train=True, budget=0.2)
    assert {*seen} == {(True, True, True)}
    assert len(gradients) == len(seen)
    # Random ones: a constant gradient vanishes in a norm, and makes slow, denormal numbers.
    assert gradients[0].unique().numel() > 1
    seen.clear()
    compare({"a": model}, BATCH, budget=0.2)
    assert {*seen} == {(False, False, True)}
    assert model.training


def test_inputs_differ_between_rounds_and_are_equal_within_one():
    clock, seen = Clock(), {"a": [], "b": []}

    def variant(name):
        def call(x):
            seen[name].append(bits(x))
            x.zero_()  # may write into its input, and spoils it for nobody
            clock.now += 0.1

        return call

    compare({name: variant(name) for name in "ab"}, torch.randn(4, 3), budget=6, _clock=clock)
    assert len({*seen["b"]}) > 4
    assert {*seen["a"]} == {*seen["b"]}


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
