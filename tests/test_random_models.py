"""Models and pipelines made by chance: what is promised of one holds for all of them."""

import copy
import pickle
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import convert_conv2d_weight_memory_format, convert_conv3d_weight_memory_format
from torch.nn.utils import parametrizations, parametrize, prune

from networks import facts, same, tensors
from prepare import recipe
from prepare.audit import audit
from prepare.errors import RefusedError
from prepare.pipeline import Pipeline

pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")

# ------------------------------------------------------------------------------------------- models

WRAPPERS = {
    "as it is": lambda conv: conv,
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "old weight_norm": nn.utils.weight_norm,
    "old spectral_norm": nn.utils.spectral_norm,
    "pruned": lambda conv: prune.l1_unstructured(conv, "weight", 0.5),
}
# Where the weight itself is computed, the tensors that it is computed from.
BEHIND = ("weight_g", "weight_v", "weight_orig", "weight_mask")


@dataclass(frozen=True)
class Conv:
    """A convolution; one channel, depthwise, grouped and 1x1 are among them."""

    rank: int
    transposed: bool
    groups: int
    into: int
    out: int
    kernel: int
    bias: bool
    wrapper: str

    def build(self):
        cls = getattr(nn, f"Conv{'Transpose' * self.transposed}{self.rank}d")
        sizes = (self.groups * self.into, self.groups * self.out, self.kernel)
        return WRAPPERS[self.wrapper](cls(*sizes, groups=self.groups, bias=self.bias))


class Standardized(nn.Conv2d):
    """Computes its weight in a forward of its own."""

    def forward(self, x):
        return self._conv_forward(x, self.weight - self.weight.mean(), self.bias)


class Keeper(nn.Linear):
    """Never lets its bias out of float32."""

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        self.bias.data = self.bias.data.float()
        return self


OTHERS = {
    "linear": lambda: nn.Linear(2, 3),
    "embedding": lambda: nn.Embedding(3, 2),
    "batch norm": lambda: nn.BatchNorm2d(2),
    "batch norm without weights": lambda: nn.BatchNorm3d(2, affine=False),
    "batch norm without statistics": lambda: nn.BatchNorm1d(2, track_running_stats=False),
    "instance norm": lambda: nn.InstanceNorm3d(2, affine=True, track_running_stats=True),
    "bare instance norm": lambda: nn.InstanceNorm2d(2),
    "group norm": lambda: nn.GroupNorm(1, 2),
    "layer norm": lambda: nn.LayerNorm(2),
    "attention": lambda: nn.MultiheadAttention(2, 1),
    "own forward": lambda: Standardized(2, 2, 3),
    "nothing": nn.ReLU,
}
NAMES = ("a", "weight", "encoder")
CONTAINERS = {
    "Sequential": lambda children: nn.Sequential(*children),
    "ModuleList": nn.ModuleList,
    "ModuleDict": lambda children: nn.ModuleDict(dict(zip(NAMES, children, strict=False))),
}
BUFFERS = {
    "int64": lambda: torch.arange(3),
    "bool": lambda: torch.tensor([True, False]),
    "complex64": lambda: torch.randn(2, dtype=torch.complex64),
    "float64": lambda: torch.randn(2, 2, dtype=torch.float64),
    "bfloat16": lambda: torch.randn(2).bfloat16(),
    "one number": lambda: torch.tensor(0.5),
    "no numbers": lambda: torch.empty(0, 2),
}
PARAMETERS = {
    "4-d": lambda: torch.randn(2, 2, 3, 3),
    "5-d": lambda: torch.randn(1, 2, 2, 2, 2),
    "4-d in channels_last": lambda: torch.randn(1, 2, 3, 3).to(memory_format=torch.channels_last),
    "transposed": lambda: torch.randn(2, 3).T,
    "sliced": lambda: torch.randn(2, 4, 3, 3)[:, ::2],
    "float64": lambda: torch.randn(2, dtype=torch.float64),
    "complex64": lambda: torch.randn(2, 2, dtype=torch.complex64),
}


def hook(module, *_):
    """A hook that does nothing, and can be pickled."""


def own_modules(model):
    """Every module but those that torch makes for parametrizations."""
    inner = {
        id(part)
        for module in model.modules()
        if parametrize.is_parametrized(module)
        for part in module.parametrizations.modules()
    }
    return [module for module in model.modules() if id(module) not in inner]


def alike(model, first, second):
    """Two places of parameters of one shape and type: `(module, name)` of one, and the other parameter."""
    held = [
        (m, name, p) for m in model.modules() for name, p in m._parameters.items() if p is not None
    ]
    if not held:
        return None
    module, name, parameter = held[first % len(held)]
    others = [p for *_, p in held if (p.shape, p.dtype) == (parameter.shape, parameter.dtype)]
    return module, name, others[second % len(others)]


def tie(model, first, second):
    if found := alike(model, first, second):
        module, name, other = found
        module._parameters[name] = other


def alias(model, first, second):
    if found := alike(model, first, second):
        module, name, other = found
        module._parameters[name] = nn.Parameter(other.data, other.requires_grad)


def as_views(model, first, second):
    if found := alike(model, first, second):
        module, name, other = found
        mine = module._parameters[name]
        flat = torch.cat([mine.detach().reshape(-1), other.detach().reshape(-1)])
        mine.data, other.data = (half.view(mine.shape) for half in flat.chunk(2))


def share(model, first, second):
    modules = own_modules(model)
    holders = [m for m in modules if type(m).__name__ in CONTAINERS]
    module = modules[second % len(modules)]
    if holders and (holder := holders[first % len(holders)]) not in set(module.modules()):
        holder.add_module(f"again{second}", module)


def of_module(change):
    """A deed done to one module of the model."""

    def deed(model, first, second):
        modules = own_modules(model)
        change(modules[first % len(modules)], f"extra{second}")

    return deed


def add_buffer(make):
    return of_module(lambda module, name: module.register_buffer(name, make(), persistent=False))


def add_parameter(make):
    return of_module(lambda module, name: module.register_parameter(name, nn.Parameter(make())))


DEEDS = {
    "tie": tie,
    "share": share,
    "alias": alias,
    "views": as_views,
    "freeze": of_module(lambda module, _: module.requires_grad_(False)),
    "eval": of_module(lambda module, _: module.eval()),
    "hook": of_module(lambda module, _: module.register_forward_hook(hook)),
    "pre-hook": of_module(lambda module, _: module.register_forward_pre_hook(hook)),
    **{f"buffer: {name}": add_buffer(make) for name, make in BUFFERS.items()},
    **{f"parameter: {name}": add_parameter(make) for name, make in PARAMETERS.items()},
}
