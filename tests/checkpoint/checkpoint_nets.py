"""Networks that are difficult to save or load, and what the tests of checkpoints compare of them."""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from prepare.checkpoint import save
from prepare.pipeline import Pipeline

FORMATS = ("w.safetensors", "w.pt")
NOTHING = Pipeline([])
STEPS = {
    "device": {"device": "cpu"},
    "half": {"dtype": "bfloat16"},
    "conv2d_memory_format": {},
    "repair_layout": {"force": True},
    "input_format": {"attach": True},
}


def pipeline(**more) -> Pipeline:
    return Pipeline.from_config(STEPS | more)


class Awkward(nn.Module):
    """Tied weights, unsaved and complex buffers, a computed weight, a recurrent layer, a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 8)
        self.head = nn.Linear(8, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.conv = nn.Conv2d(3, 8, 3)
        self.conv.weight.is_special = True
        self.conv.bias.requires_grad_(requires_grad=False)
        self.point = nn.Conv2d(8, 8, 1)
        self.norm = nn.BatchNorm2d(8)
        self.lost = nn.InstanceNorm2d(8, affine=True)
        self.computed = parametrizations.weight_norm(nn.Conv2d(8, 8, 3))
        self.recurrent = nn.LSTM(4, 4)
        self.register_buffer("table", torch.randn(4, 3).t())
        self.register_buffer("phase", torch.tensor([1 + 2j]))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("scalar", torch.tensor(3))
        self.register_buffer("empty", torch.zeros(0, 4))
        self.register_buffer("positions", torch.arange(5), persistent=False)
        self.frequencies = torch.linspace(0, 1, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.lost(self.computed(self.point(self.norm(self.conv(x)))))


class FromItsWeights(nn.Module):
    """Keeps a tensor that it computed from the values of a parameter, and does not save it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 1)
        self.register_buffer("scale", self.conv.weight.detach().abs().sum(), persistent=False)


class NeedsItsWeights(nn.Module):
    """Reads the value of a parameter while it is built."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 1)
        self.start = float(self.conv.weight.detach().sum())


def small() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1))


def small_like(model: nn.Module) -> nn.Module:
    like = small()
    like.load_state_dict(model.state_dict())
    return like


def write(model: nn.Module, path: Path) -> None:
    """Write the weights of a model as this suffix says: by `save`, or by torch."""
    if path.suffix == ".safetensors":
        save(model, path)
    else:
        torch.save(model.state_dict(), path)
