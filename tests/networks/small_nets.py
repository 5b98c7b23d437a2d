"""Small networks that tests prepare, and ways to look at them."""

import copy
from typing import Any

from torch import nn

from paths import CONF
from prepare.app.job.model_target import without_method
from prepare.core.forward.call import calling
from prepare.step import ModelStep
from prepare.testing.networks import Tied, bits, facts, mixed, small_2d, small_3d, tensors

__all__ = ["Tied", "bits", "build", "clone", "config_of", "facts", "mixed", "model_configs"]
__all__ += ["Flag", "same"]
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


def clone(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model)


class Flag(ModelStep):
    """Sets a flag."""

    def targets(self, model):
        return () if getattr(model, "flag", False) else ("",)

    def act(self, model):
        model.flag = True
