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
    """Never lets its bias be cast."""

    def _apply(self, fn, recurse=True):
        bias = self.bias.data
        super()._apply(fn, recurse)
        self.bias.data = bias
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
    "own cast": lambda: Keeper(2, 3),
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


def parameters(model):
    """`(module, name, parameter)` of every place."""
    found = ((m, name, p) for m in model.modules() for name, p in m._parameters.items())
    return [(m, name, p) for m, name, p in found if p is not None]


def of_two_parameters(change):
    """A deed done to two parameters of one shape and type, if there are two."""

    def deed(model, first, second):
        held = parameters(model)
        module, name, one = held[first % len(held)] if held else (None, None, None)
        others = [p for *_, p in held if p is not one and (p.shape, p.dtype) == (one.shape, one.dtype)]
        if others:
            change(module._parameters, name, others[second % len(others)])

    return deed


def tie(table, name, other):
    table[name] = other


def alias(table, name, other):
    table[name] = nn.Parameter(other.data, other.requires_grad)


def as_views(table, name, other):
    flat = torch.cat([table[name].detach().reshape(-1), other.detach().reshape(-1)])
    table[name].data, other.data = (half.view(other.shape) for half in flat.chunk(2))


def of_module(change):
    """A deed done to one module."""

    def deed(model, first, second):
        modules = own_modules(model)
        change(modules[first % len(modules)])

    return deed


def share(model, first, second):
    """Lets a module stand in one more place, but never inside itself."""
    modules = own_modules(model)
    holders = [m for m in modules if type(m).__name__ in CONTAINERS]
    module = modules[second % len(modules)]
    if holders and (holder := holders[first % len(holders)]) not in set(module.modules()):
        holder.add_module(f"again{len(holder)}", module)


def slice_weight(module):
    if isinstance(module, CONVOLUTIONS) and not is_computed(module):
        wider = torch.cat([module.weight, module.weight], dim=1)
        module.weight = nn.Parameter(wider[:, ::2])


def is_computed(module):
    """Whether torch computes the weight of this module from other tensors."""
    return "weight" not in module._parameters


def add_buffer(make):
    return of_module(lambda module: module.register_buffer(free_name(module), make(), persistent=False))


def add_parameter(make):
    return of_module(lambda module: module.register_parameter(free_name(module), nn.Parameter(make())))


def free_name(module):
    return f"extra{len(module._buffers) + len(module._parameters)}"


DEEDS = {
    "tie": of_two_parameters(tie),
    "alias": of_two_parameters(alias),
    "views": of_two_parameters(as_views),
    "share": share,
    "sliced": of_module(slice_weight),
    "channels_last": of_module(lambda module: module.to(memory_format=torch.channels_last)),
    "freeze": of_module(lambda module: module.requires_grad_(requires_grad=False)),
    "eval": of_module(lambda module: module.eval()),
    "hook": of_module(lambda module: module.register_forward_hook(hook)),
    "pre-hook": of_module(lambda module: module.register_forward_pre_hook(hook)),
    **{f"buffer: {name}": add_buffer(make) for name, make in BUFFERS.items()},
    **{f"parameter: {name}": add_parameter(make) for name, make in PARAMETERS.items()},
}
# What torch's own calls do something else with, which depends on the order of modules.
ODD = {"alias", "views", "own cast"}


@dataclass(frozen=True)
class Spec:
    """A model as plain data: a tree of modules, and what is done to it afterwards."""

    tree: tuple
    deeds: tuple

    def build(self):
        """The same model, bit for bit, every time."""
        torch.manual_seed(0)
        with torch.no_grad():  # so that computed weights can be copied
            model = built(self.tree)
            for name, first, second in self.deeds:
                DEEDS[name](model, first, second)
        return model

    def has(self, names):
        found = {name for name, *_ in self.deeds} | set(leaves(self.tree))
        return bool(found & names)


def built(tree):
    kind, content = tree
    if kind in CONTAINERS:
        return CONTAINERS[kind]([built(child) for child in content])
    return content.build() if kind == "conv" else OTHERS[content]()


def leaves(tree):
    kind, content = tree
    return [leaf for child in content for leaf in leaves(child)] if kind in CONTAINERS else [content]


SIZES = st.integers(1, 2)
WRAPPER = st.sampled_from(["as it is"] * 4 + list(WRAPPERS))
CONV = st.builds(
    Conv, st.integers(1, 3), st.booleans(), SIZES, SIZES, SIZES, st.integers(1, 3), st.booleans(), WRAPPER
)
LEAF = st.tuples(st.just("conv"), CONV) | st.tuples(st.just("other"), st.sampled_from(list(OTHERS)))
TREE = st.recursive(
    LEAF,
    lambda inner: st.tuples(st.sampled_from(list(CONTAINERS)), st.lists(inner, min_size=1, max_size=3)),
    max_leaves=6,
)
DEED = st.tuples(st.sampled_from(list(DEEDS)), st.integers(0, 9), st.integers(0, 9))
SPECS = st.builds(Spec, TREE, st.lists(DEED, max_size=6).map(tuple))

# ---------------------------------------------------------------------------------------- pipelines

FORMATS = {2: torch.channels_last, 3: torch.channels_last_3d}
