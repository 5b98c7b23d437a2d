"""Find convolutions whose output goes only to a batch norm, by a symbolic trace, and fuse the two."""

import inspect
from collections import Counter
from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils.fusion import fuse_conv_bn_weights
from torch.nn.utils.parametrize import is_parametrized
from torch.utils._pytree import tree_leaves

from prepare.core.model.forward_code import forward_code
from prepare.core.model.module_kinds import CONVOLUTIONS, TRANSPOSED
from prepare.core.model.module_tree import copy_tree
from prepare.core.model.tensors import identity, is_plain, is_strided, named_tensors
from prepare.core.utils.process_state import PROCESS_STATE, ignored_warnings
from prepare.step import MEMO

_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_NOT_FOUND = "no convolution was found whose output goes only to this norm"
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def is_norm(module: nn.Module) -> bool:
    """Return whether this is a batch norm that runs torch's own code."""
    return isinstance(module, _NORMS) and forward_code(module).alone


def _is_convolution(module: nn.Module) -> bool:
    # No linear layer: whether its features are the norm's channels depends on the input's rank.
    return isinstance(module, CONVOLUTIONS) and forward_code(module).alone


def find_pairs(model: nn.Module) -> tuple[dict[str, nn.Module], dict[str, str]]:
    """Return the convolution to fuse with each norm, by its name, and why each other norm stays.

    Modules that cannot be traced are searched by their parts. A plan or `apply` traces a tree once.
    """
    memo, modules = MEMO.get({}), dict(model.named_modules())
    tree = tuple((name, type(module)) for name, module in modules.items())
    if not any(map(is_norm, modules.values())):
        return {}, {}
    if tree not in memo:
        memo[tree] = dict(_names_of_pairs(model, ""))
    holders: dict[Any, set[int]] = {}
    for place in named_tensors(model):
        holders.setdefault(identity(place.tensor), set()).add(id(place.module))
    tied = {each for held_by in holders.values() if len(held_by) > 1 for each in held_by}
    pairs, unfused = dict[str, nn.Module](), dict[str, str]()
    for name, norm in modules.items():
        if is_norm(norm):
            conv = memo[tree].get(name)
            reason = _obstacle(modules[conv], norm, tied) if conv else _NOT_FOUND
            if reason := _obstacle_of_norm(norm) or reason:
                unfused[name] = reason
            else:
                pairs[name] = modules[conv]
    return pairs, unfused


def fuse(convolution: Any, norm: Any) -> None:
    """Give `convolution` the weight and bias that compute both modules; `norm` is not changed.

    Computes in float32 or wider. The new Parameters have the dtype, strides and requires_grad of the old.
    """
    old = convolution.weight
    dtype = torch.promote_types(old.dtype, torch.float32)
    tensors = (old, convolution.bias, norm.running_mean, norm.running_var, norm.weight, norm.bias)
    wide: list[Any] = [None if each is None else each.detach().to(dtype) for each in tensors]
    transposed = isinstance(convolution, TRANSPOSED)
    fused: Any = fuse_conv_bn_weights
    weight, bias = fused(*wide[:4], norm.eps, *wide[4:], transposed)
    new = torch.empty_like(old).copy_(weight), bias.to(old.dtype)
    convolution.weight, convolution.bias = (
        nn.Parameter(each.detach(), requires_grad=old.requires_grad) for each in new
    )


class _Tracer(fx.Tracer):
    """Takes norms, convolutions and modules with hooks for one operation each, and `size` for any number."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Value(node, self)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        is_one = is_norm(m) or _is_convolution(m) or _has_hooks(m)
        return is_one or super().is_leaf_module(m, module_qualified_name)


class _Value(fx.Proxy):
    def __int__(self) -> int:
        tracer: Any = self.tracer
        return tracer.size


def _names_of_pairs(model: nn.Module, prefix: str) -> Iterator[tuple[str, str]]:
    """Yield the names of a norm and of the convolution before it, in the module `prefix` of a model."""
    module = model.get_submodule(prefix)
    inside = list(module.modules())
    if not (any(map(is_norm, inside)) and any(map(_is_convolution, inside))):
        return
    dot = f"{prefix}." if prefix else ""
    pairs = _pairs(module)
    if pairs is not None:
        for pair in sorted(pairs):
            norm, conv = (module.get_submodule(name) for name in pair)
            if not (is_norm(norm) and _is_convolution(conv)):
                continue
            names = [n for n, m in model.named_modules(remove_duplicate=False) if m in (norm, conv)]
            if all(name.startswith(dot) for name in names):  # it has no use outside of this part
                yield dot + pair[0], dot + pair[1]
        parts = [name for name, inner in module.named_modules() if name and _has_hooks(inner)]
    else:
        parts = [name for name, _ in module.named_children()]
    for name in parts:
        yield from _names_of_pairs(model, dot + name)


def _pairs(module: nn.Module) -> set[tuple[str, str]] | None:
    """Return the pairs of all calls, with the required arguments and with all; None if one is not traced.

    A size that forward converts with `int(...)` is even in one call, and odd in another.

    A trace runs on a copy of the module tree, and on tensors without data.
    """
    parameters = inspect.signature(module.forward).parameters.values()
    defaults = {each.name: each.default for each in parameters if each.default is not each.empty}
    found: list[set[tuple[str, str]]] = []
    for constants, size in product(({}, defaults) if defaults else ({},), (32, 33)):
        if (graph := _graph(module, constants, size)) is None:
            return None
        found.append(set(_pairs_in(graph)))
    return set.intersection(*found)


def _graph(module: nn.Module, constants: dict[str, Any], size: int) -> fx.Graph | None:
    if "forward" in vars(module):  # torch.fx traces that of the class
        return None
    # Forward may write into buffers, and into other tensors.
    clone = copy_tree(module, lambda x: x if isinstance(x, nn.Parameter) else x.clone())
    for inner in map(vars, clone.modules()):
        inner["_compiled_call_impl"] = None
        inner.update((k, each.clone()) for k, each in inner.items() if isinstance(each, Tensor))
    try:
        with PROCESS_STATE, ignored_warnings(), FakeTensorMode(allow_non_fake_inputs=True):
            graph = _Tracer(size).trace(clone, constants or None)
    except Exception:  # the model's own code runs on proxies, and may raise anything
        return None
    held = tree_leaves([vars(inner) for inner in clone.modules()])
    # An attribute keeps a value of the trace, which others may read.
    return None if any(isinstance(each, fx.Proxy) for each in held) else graph


def _pairs_in(graph: fx.Graph) -> Iterator[tuple[str, str]]:
    """Yield the names of a norm and of the convolution before it, if each is called once and used once."""
    calls = [node for node in graph.nodes if node.op == "call_module"]
    count = Counter(node.target for node in calls)
    # A weight that forward itself uses.
    read = {node.target.rpartition(".")[0] for node in graph.nodes if node.op == "get_attr"}
    once = [node for node in calls if count[node.target] == 1 and node.target not in read]
    for node in once:
        before = node.all_input_nodes
        if len(before) == 1 and before[0] in once and list(before[0].users) == [node]:
            yield node.target, before[0].target


def _obstacle_of_norm(norm: Any) -> str:
    if norm.training:
        return "in training mode; call model.eval() first"
    if norm.running_mean is None or norm.running_var is None:
        return "it has no running statistics"
    return ""


def _obstacle(conv: Any, norm: Any, tied: set[int]) -> str:
    """Return why a convolution and the norm after it must not be fused; empty if they may be."""
    pair = (conv, norm)
    tensors = [each for module in pair for each in (*module.parameters(), *module.buffers())]
    floats = [each for each in tensors if each.dim()]
    both = "it, or the convolution before it,"
    obstacles = {
        "the convolution before it is in training mode": conv.training,
        f"{both} has hooks": any(map(_has_hooks, pair)),
        f"{both} is parametrized": any(map(is_parametrized, pair)),
        f"{both} shares a tensor with another module": any(id(each) in tied for each in pair),
        "their tensors are not plain floating-point tensors": not all(
            is_strided(each) and is_plain(each) and each.is_floating_point() for each in floats
        ),
        "they are on different devices": len({each.device for each in floats}) > 1,
        "they are being trained: a parameter holds a gradient or a hook": any(
            each.grad is not None or each._backward_hooks for each in tensors
        ),
        "the transposed convolution before it is grouped": isinstance(conv, TRANSPOSED)
        and conv.groups > 1,
        "its number of channels differs from that of the convolution before it": conv.out_channels
        != norm.num_features,
    }
    return next((reason for reason, holds in obstacles.items() if holds), "")


def _has_hooks(module: nn.Module) -> bool:
    return any(getattr(module, kind) for kind in _HOOKS)
