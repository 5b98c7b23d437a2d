"""Test what a guard looks at, and how it names what it finds."""

from itertools import pairwise

import pytest
import torch
from torch import nn

from guarded import ALL, STEPS, add, images, prepared, train
from prepare.errors import DriftError, GuardError
from prepare.pipeline import Pipeline


def test_a_difference_names_the_module_the_numbers_and_the_call():
    _, model = prepared()
    with torch.no_grad(), prepared()[0].guard(model) as guard:
        model(images())
        add(model[4].conv, size=20)
        with pytest.raises(
            GuardError, match=r"4\.conv: its outputs are off by [\d.e-]+ of their scale"
        ):
            model(images(22))
    (found,) = guard.differences
    assert found.module == "4.conv"
    assert found.call == "[2, 8, 20, 20] float32 channels_last, eval"


STEPS_OF_KINDS = {
    "repaired": STEPS,
    "with rewritten calls": STEPS | {"keep_layout": {}},
    "kept in float32": {
        "half": {"dtype": "bfloat16", "keep": ["4"]},
        "input_format": {"attach": True},
    },
    "in bfloat16": {"half": {"dtype": "bfloat16"}, "input_format": {"attach": True}},
    "in channels_last": STEPS,
    "compiled": {"compile": {"backend": "eager"}},
}


@pytest.mark.parametrize("kind", STEPS_OF_KINDS)
def test_each_kind_of_change_is_looked_at(kind):
    pipeline, model = prepared(STEPS_OF_KINDS[kind])
    with torch.no_grad(), pipeline.guard(model) as guard:
        name = next(name for name, each in guard.watched.items() if each == kind)
        model(images())
        assert guard.left_out == {}
        looks = guard.looks
        assert looks >= len(set(guard.watched) - {""})
        model(images())
        assert guard.looks == looks
        assert kind in repr(guard)
        module = model.get_submodule(name)
        module.register_forward_hook(lambda _m, _a, out: out * 1.5)
        if kind == "compiled":  # a hook that is added later does not run
            with torch.no_grad():
                model[6].weight.mul_(1)
            torch._dynamo.reset()
        with pytest.raises(GuardError):
            model(images(20))


def test_another_stride_dtype_autocast_or_mode_is_another_key():
    pipeline, model = prepared({"conv2d_memory_format": {}})
    batch = images()
    with pipeline.guard(model) as guard:
        looks = []

        def call(x):
            model(x)
            looks.append(guard.looks)

        with torch.no_grad():
            call(batch)
            call(batch)
            call(batch.to(memory_format=torch.channels_last))
            with torch.autocast("cpu", torch.bfloat16):
                call(batch)
            model.train()
            call(batch)
            model.eval()
        call(batch)
        with torch.inference_mode():
            call(batch)
    assert [a < b for a, b in pairwise(looks)] == [False, *[True] * 4, False]
    assert guard.differences == []


def test_drift_is_found_in_training_and_at_a_new_key():
    pipeline, model = prepared(training=True)
    guard = pipeline.guard(model, every=2)
    model[0].weight.data = model[0].weight.data.contiguous()
    with pytest.raises(DriftError, match=r"0\.weight"):
        train(model, guard, 2)
    with pytest.raises(DriftError, match=r"0\.weight"), torch.no_grad():
        model.eval()(images())


def test_a_module_in_train_mode_is_found_in_a_model_that_serves():
    pipeline, model = prepared()
    model[3].train()  # dropout that is kept on, before the guard is made
    with torch.no_grad(), pipeline.guard(model) as guard:
        model(images())
        model[1].train()
        with pytest.raises(DriftError, match="1: is in train mode in a model in eval mode"):
            model(images(20))
        model.train()(images(24))
        assert guard.differences == []


def test_state_of_the_optimizer_is_checked_for_drift():
    pipeline, model = prepared(training=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    guard = pipeline.guard(model, every=1, share=ALL, optimizer=optimizer)
    train(model, guard, 1)
    model(images()).mean().backward()
    optimizer.step()
    state = optimizer.state[model[0].weight]
    state["momentum_buffer"] = state["momentum_buffer"].contiguous()
    with pytest.raises(DriftError, match="momentum_buffer"):
        guard()


class Odd(nn.Module):
    """Computed and tied weights, lists of weights, fast paths, and operations in place."""

    def __init__(self):
        super().__init__()
        self.conv = nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 8, 3))
        self.old, self.act = nn.utils.spectral_norm(nn.Conv2d(8, 8, 3)), nn.ReLU(inplace=True)
        self.lstm = nn.LSTM(8, 8, batch_first=True, dropout=0.2, num_layers=2)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True, dropout=0.1)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.second.weight = self.first.weight

    def forward(self, x):
        x = self.act(self.old(self.act(self.conv(x)))).flatten(2).transpose(1, 2)
        x, _ = self.lstm(x)
        x, _ = self.attention(x, x, x)
        return self.second(self.act(self.first(self.encoder(x))))


@pytest.mark.parametrize("training", [False, True])
def test_modules_of_every_kind_run_alone_without_a_false_alarm(training):
    torch.manual_seed(0)
    pipeline, model = Pipeline.from_config(STEPS), Odd().train(training)
    pipeline.apply(model, known_issues="ignore")
    with pipeline.guard(model, every=1, share=ALL) as guard:
        if training:
            train(model, guard, 1, images(8))
        else:
            with torch.no_grad():
                model(images(8))
    assert guard.looks >= 10
    assert guard.left_out == {}
