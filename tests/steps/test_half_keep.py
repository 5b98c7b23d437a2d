"""The option `keep` of the step half: modules that stay in float32 inside a 16-bit model."""

import copy
import pickle
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from prepare.core.forward.input_formatter import casts_of
from prepare.pipeline import Pipeline
from prepare.stages.verify import verify
from prepare.steps import half

LOW, X = torch.bfloat16, torch.linspace(-1, 1, 12).view(3, 4).bfloat16()


class Seen(nn.Module):
    """Records the dtypes of its arguments, and returns results of several types."""

    def forward(self, x, *, more=None):
        tensors = [x, *((more["a"][0], more["b"]) if more else ())]
        self.dtypes = [tensor.dtype for tensor in tensors if isinstance(tensor, Tensor)]
        return x * 2


class Wrapped(NamedTuple):
    first: Tensor
    rest: list


@dataclass
class Held:
    value: Tensor


class Returns(nn.Module):
    """Returns nested tensors in float32, and integers."""

    def forward(self, x):
        return Wrapped(x, [{"a": (x, torch.arange(2))}, Held(x)])


class Net(nn.Module):
    """Four kinds of children: one called with nested keywords, a list, a nested block and a head."""

    def __init__(self):
        super().__init__()
        self.first, self.seen, self.returns = nn.Linear(4, 4), Seen(), Returns()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2)])
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        x = self.first(x)
        x = self.seen(x, more={"a": (x, 3), "b": torch.arange(2)})
        self.returned = self.returns(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def prepared(model, *keep, dtype="bfloat16", **more):
    pipeline = Pipeline.from_config({"half": {"dtype": dtype, "keep": list(keep)}, **more})
    return pipeline.apply(model), pipeline


def cast(model):
    return [name for name, module in model.named_modules() if casts_of(module)]


def net():
    torch.manual_seed(0)
    return Net()


def test_a_kept_module_computes_in_float32_and_returns_16_bits():
    model, _ = prepared(net(), "seen", "returns", "head")
    assert model(X).dtype == LOW
    assert model.seen.dtypes == [torch.float32, torch.float32, torch.int64]
    returned = model.returned
    assert isinstance(returned, Wrapped)
    assert returned.first.dtype == LOW
    assert [t.dtype for t in returned.rest[0]["a"]] == [LOW, torch.int64]
    assert returned.rest[1].value.dtype == LOW
    assert model.head.weight.dtype == torch.float32
    assert model.first.weight.dtype == LOW


def test_a_kept_module_is_kept_with_all_in_it_and_cast_once():
    model, pipeline = prepared(net(), "blocks", "blocks.0.0", "type:ReLU")
    assert cast(model) == ["blocks.0", "blocks.1"]  # a ModuleList is not called itself
    assert {p.dtype for p in model.blocks.parameters()} == {torch.float32}
    assert model(X).dtype == LOW
    assert not pipeline.check(model)


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_a_model_with_kept_modules_is_verified_in_both_modes(mode):
    model = net().train(mode == "train")
    reference = copy.deepcopy(model)
    prepared_model, pipeline = prepared(model, "blocks", "head", input_format={})
    found = verify(reference, prepared_model, X.float(), pipeline=pipeline, mode=mode)
    assert found.status == "pass", found.reason
    assert not cast(reference)


def test_gradients_reach_parameters_on_both_sides_of_the_casts():
    model, _ = prepared(net().train(), "blocks.0")
    model(X).float().square().sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    assert all(gradient.any() for gradient in gradients.values())
    assert gradients["blocks.0.0.weight"].dtype == torch.float32
    assert gradients["first.weight"].dtype == LOW


@pytest.mark.parametrize("again", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_casts_survive_copies(again):
    model, pipeline = prepared(net(), "blocks", "head")
    copied = again(model)
    assert cast(copied) == cast(model)
    assert not pipeline.check(copied)
    assert torch.equal(copied(X), model(X))


def test_undo_removes_the_casts():
    model, _ = prepared(net(), "blocks", "head")
    half.undo(model)
    assert not cast(model)
    assert model.float()(X.float()).dtype == torch.float32


def test_a_failure_removes_the_casts(monkeypatch):
    model = net()
    monkeypatch.setattr("prepare.pipeline.apply._check_nothing_left", lambda survey: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        prepared(model, "head")
    assert not cast(model)
    assert model(X.float()).dtype == torch.float32


def test_the_other_holder_of_a_kept_weight_is_cast_too():
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 5, bias=False))
    model[2].weight = model[0].weight
    prepared(model, "2")
    assert cast(model) == ["0", "2"]
    assert model(torch.arange(3)).dtype == LOW


def test_a_kept_convolution_is_fused_repaired_and_channels_last():
    torch.manual_seed(0)
    reference = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.InstanceNorm2d(8), nn.Conv2d(8, 4, 1)
    ).eval()
    steps = {"fuse_conv_bn": {}, "repair_layout": {"force": True}, "conv2d_memory_format": {}}
    model, pipeline = prepared(copy.deepcopy(reference), "0", "3", **steps, input_format={})
    assert cast(model) == ["0"]
    assert type(model[3]).__name__ == "KeepingInstanceNorm2d"
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
    batch = torch.randn(2, 3, 8, 8)
    assert model(pipeline.format(batch)).is_contiguous(memory_format=torch.channels_last)
    assert verify(reference, model, batch, pipeline=pipeline).status == "pass"
