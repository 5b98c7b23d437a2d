"""Models made by chance, as plain data that builds the same one every time.

A `Spec` is a tree of modules and the deeds that are done to them afterwards: ties, shared modules,
further tensors, hooks. `SPECS` is hypothesis's strategy for them.
"""

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from small_nets import tensors

WRAPPERS = {
    "as it is": lambda conv: conv,
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "old weight_norm": nn.utils.weight_norm,
    "old spectral_norm": nn.utils.spectral_norm,
    "pruned": lambda conv: prune.l1_unstructured(conv, "weight", 0.5),
}
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
# Where the weight itself is computed by a hook, the tensors that it is computed from.
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
# What a cast cannot treat as plain numbers: each is exact afterwards, or refused by name.
MATRIX = torch.tensor([[0.5, 0, 0, -2], [0, 0, 3, 0], [0, 0, 0, 0], [1, 0, 0, 4]])
FORMS = {
    "csr": lambda: MATRIX.to_sparse_csr(),
    "csc": lambda: MATRIX.to_sparse_csc(),
    "bsr": lambda: MATRIX.to_sparse_bsr((2, 2)),
    "bsc": lambda: MATRIX.to_sparse_bsc((2, 2)),
    "mkldnn": lambda: MATRIX.to_mkldnn(),
    "nested": lambda: torch.nested.nested_tensor([torch.randn(2), torch.randn(3)]),
    "quantized": lambda: torch.quantize_per_tensor(MATRIX, 0.5, 0, torch.qint8),
}
VIEWS = {
    "conjugate": lambda: torch.randn(2, 3, dtype=torch.complex64).conj(),
    "imaginary": lambda: torch.randn(3, dtype=torch.complex64).imag,
    "negative": lambda: torch.randn(2, 2, dtype=torch.complex64).conj().imag,
    "negative, one number": lambda: torch.randn(1, dtype=torch.complex64).conj().imag,
}
SPARSE = {
    "coo": lambda: MATRIX.to_sparse_coo(),
    "coo twice": lambda: torch.sparse_coo_tensor([[0, 0], [1, 1]], [4e4, 3e4], (2, 2)),
    "coo float64": lambda: MATRIX.double().to_sparse_coo(),
}
LARGE = {
    "lowest": lambda: torch.tensor([0.0, torch.finfo(torch.float32).min, -torch.inf, torch.nan]),
    "largest": lambda: torch.full((2, 2, 3, 3), torch.finfo(torch.float32).max),
    "70000": lambda: torch.tensor([1.0, 7e4, -65520.0, 65519.0]),
    "1e300": lambda: torch.tensor([[1e300, -1e39, 2.0]], dtype=torch.float64),
    "coo 1e39": lambda: torch.tensor([[0, 1e39], [-7e4, 0]], dtype=torch.float64).to_sparse_coo(),
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


def own_places(model):
    own = set(own_modules(model))
    return [place for place in model.named_modules(remove_duplicate=False) if place[1] in own]


def places(model):
    """`(table, name, tensor)` of every place of every parameter and buffer."""
    tables = (table for m in model.modules() for table in (m._parameters, m._buffers))
    found = ((table, name, tensor) for table in tables for name, tensor in table.items())
    return [place for place in found if place[2] is not None]


def of_two_tensors(change):
    """A deed done to two parameters, or two buffers, of one shape and type; if there are two."""

    def deed(model, first, second):
        held = places(model)
        table, name, one = held[first % len(held)] if held else ({}, "", torch.empty(0))
        alike = [
            other
            for *_, other in held
            if other is not one
            and stored_plainly(other)
            and stored_plainly(one)
            and (type(other), other.shape, other.dtype) == (type(one), one.shape, one.dtype)
        ]
        if alike:
            change(table, name, alike[second % len(alike)])

    return deed


def stored_plainly(tensor):
    return tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_quantized)


def tie(table, name, other):
    table[name] = other


def alias(table, name, other):
    held = other.data
    is_parameter = isinstance(other, nn.Parameter)
    table[name] = nn.Parameter(held, other.requires_grad) if is_parameter else held


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


def lay_out(module):
    for tensor in tensors(module).values():
        if tensor.dim() in (4, 5):
            memory_format = torch.channels_last if tensor.dim() == 4 else torch.channels_last_3d
            tensor.data = tensor.data.contiguous(memory_format=memory_format)


def is_computed(module):
    """Return whether torch computes the weight of this module from other tensors."""
    return "weight" not in module._parameters


def behind(module):
    """The tensors that a computed weight is made of."""
    if parametrize.is_parametrized(module, "weight"):
        return list(tensors(module.parametrizations["weight"]).values())
    return [tensor for name, tensor in tensors(module).items() if name in BEHIND]


def add_buffer(make, *, persistent=False):
    return of_module(
        lambda module: module.register_buffer(free_name(module), make(), persistent=persistent)
    )


def add_pair(make):
    """A deed that adds a tensor and another view of it."""

    def change(module):
        tensor = make()
        for each in (tensor, tensor.conj() if tensor.is_complex() else torch._neg_view(tensor)):
            module.register_buffer(free_name(module), each)

    return of_module(change)


def add_parameter(make):
    return of_module(
        lambda module: module.register_parameter(free_name(module), nn.Parameter(make()))
    )


def free_name(module):
    return f"extra{len(module._buffers) + len(module._parameters)}"


DEEDS = {
    "tie": of_two_tensors(tie),
    "alias": of_two_tensors(alias),
    "views": of_two_tensors(as_views),
    "share": share,
    "sliced": of_module(slice_weight),
    "channels_last": of_module(lay_out),
    "freeze": of_module(lambda module: module.requires_grad_(requires_grad=False)),
    "eval": of_module(lambda module: module.eval()),
    "hook": of_module(lambda module: module.register_forward_hook(hook)),
    "pre-hook": of_module(lambda module: module.register_forward_pre_hook(hook)),
    **{f"buffer: {name}": add_buffer(make) for name, make in BUFFERS.items()},
    **{f"parameter: {name}": add_parameter(make) for name, make in PARAMETERS.items()},
}
SPECIAL = {
    **{
        f"special: {name}": add_buffer(make, persistent=True)
        for name, make in (FORMS | VIEWS | SPARSE | LARGE).items()
    },
    "pair: conjugate": add_pair(lambda: torch.randn(2, 3, dtype=torch.complex64)),
    "pair: negative": add_pair(lambda: torch.randn(3)),
    "pair: negative, expanded": add_pair(lambda: torch.randn(1).expand(3)),
    "pair: negative, 70000": add_pair(lambda: torch.tensor([7e4, 1.0])),
}
# What torch's own calls do something else with, which depends on the order of modules.
ODD = {"alias", "views", "own cast"}
# What a weight may have begun with, other than contiguous strides.


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
                (DEEDS | SPECIAL)[name](model, first, second)
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
    return (
        [leaf for child in content for leaf in leaves(child)] if kind in CONTAINERS else [content]
    )


SIZES = st.integers(1, 2)
WRAPPER = st.sampled_from(["as it is"] * 4 + list(WRAPPERS))
CONV = st.builds(
    Conv,
    rank=st.sampled_from([2, 3, 1, 2, 3]),
    transposed=st.booleans(),
    groups=SIZES,
    into=SIZES,
    out=SIZES,
    kernel=st.integers(1, 3),
    bias=st.booleans(),
    wrapper=WRAPPER,
)
OTHER = st.tuples(st.just("other"), st.sampled_from(list(OTHERS)))
LEAF = st.one_of(*[st.tuples(st.just("conv"), CONV)] * 2, OTHER)
TREE = st.recursive(
    LEAF,
    lambda inner: st.tuples(
        st.sampled_from(list(CONTAINERS)), st.lists(inner, min_size=1, max_size=3)
    ),
    max_leaves=6,
)
ROOT = TREE | st.tuples(st.sampled_from(list(CONTAINERS)), st.lists(TREE, min_size=2, max_size=3))
SHARING = ["tie", "alias", "views", "share"]
DEED = st.tuples(
    st.sampled_from(SHARING) | st.sampled_from(list(DEEDS)), st.integers(0, 9), st.integers(0, 9)
)
SPECS = st.builds(Spec, ROOT, st.lists(DEED, max_size=6).map(tuple))
SPECIAL_DEED = st.tuples(st.sampled_from(list(SPECIAL)), st.integers(0, 9), st.integers(0, 9))
SPECIAL_SPECS = st.builds(
    lambda tree, first, special, last: Spec(tree, (*first, *special, *last)),
    ROOT,
    st.lists(DEED, max_size=2),
    st.lists(SPECIAL_DEED, min_size=1, max_size=2),
    st.lists(st.one_of(DEED, SPECIAL_DEED), max_size=1),
)
