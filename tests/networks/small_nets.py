"""Small networks that tests prepare, and ways to look at them."""

import copy
from typing import Any

import torch
from torch import nn

from paths import CONF
from prepare.app.job.model_target import without_method
from prepare.core.forward.calling import calling
from prepare.testing.networks import Tied, bits, facts, mixed, small_2d, small_3d, tensors

__all__ = [
    "Perceptron",
    "Tied",
    "bits",
    "build",
    "clone",
    "config_of",
    "facts",
    "mixed",
    "model_configs",
]
__all__ += ["perceptron", "same"]
__all__ += ["small_2d", "small_3d", "tensors"]

# Packages that may not be installed, or that pip may find no build of beside this torch: their networks are
# skipped.
OPTIONAL = (
    "diffusers",
    "dynamic_network_architectures",
    "monai",
    "timm",
    "torchvision",
    "transformers",
)


def model_configs() -> list[str]:
    """The names of all ready-made networks."""
    return sorted(path.stem for path in (CONF / "model").glob("*.yaml") if path.stem != "custom")


def config_of(name: str) -> Any:
    """The configuration of a ready-made network, merged with the one that it extends."""
    from omegaconf import OmegaConf

    own = OmegaConf.load(CONF / "model" / f"{name}.yaml")
    return OmegaConf.merge(*map(config_of, own.pop("defaults", ())), own)


def build(name: str) -> nn.Module:
    """The ready-made network of that name; skips the test where its package cannot be imported."""
    import hydra.utils
    import pytest

    config = config_of(name).model
    package = config._target_.split(".")[0]
    if package in OPTIONAL:
        pytest.importorskip(package)
    options, method = without_method(config)
    return calling(hydra.utils.instantiate(options, _convert_="all").eval(), method or "forward")


def same(model: nn.Module, reference: nn.Module) -> None:
    """Asserts that both hold the same tensors: names, types, every stride and every bit."""
    ours, theirs = tensors(model), tensors(reference)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        wanted = theirs[name]
        assert (name, tensor.dtype, tensor.stride()) == (name, wanted.dtype, wanted.stride())
        assert bits(tensor) == bits(wanted), name


class Perceptron(nn.Module):
    """Linear modules, two of which share a weight, a convolution, and an embedding that is a head, too."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 64, 2, stride=2)
        self.first = nn.Linear(64, 128)
        self.second = nn.Linear(128, 64)
        self.third = nn.Linear(128, 64)
        self.third.weight = self.second.weight
        self.embedding = nn.Embedding(10, 64)
        self.head = nn.Linear(64, 10)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = self.first(x).relu()
        return self.head(self.second(x) + self.third(x))


def perceptron() -> nn.Module:
    """A network in which the step quantize changes some weights and leaves others."""
    torch.manual_seed(0)
    return Perceptron().eval()


def clone(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model)
