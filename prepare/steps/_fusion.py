"""Find convolutions whose output goes only to a batch norm, by a symbolic trace, and fuse the two."""

import inspect
from collections import Counter
from collections.abc import Iterable, Iterator
from threading import get_ident
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
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def is_norm(module: nn.Module) -> bool:
    """Return whether this is a batch norm that runs torch's own code."""
    return isinstance(module, _NORMS) and forward_code(module).alone


def find_pairs(model: nn.Module) -> tuple[dict[str, nn.Module], dict[str, str]]:
    """Return the convolution to fuse with each norm, by its name, and why each other norm stays.

    Modules that cannot be traced are searched by their parts. A plan or `apply` traces a tree once.
    """
    memo, modules = MEMO.get({}), dict(model.named_modules())
    norms = {name: module for name, module in modules.items() if is_norm(module)}
    tree = tuple((name, type(module)) for name, module in modules.items())
    if norms and tree not in memo:
        memo[tree] = dict(_names_of_pairs(model, ""))
    tied = _tied(model) if norms else set()
    pairs, unfused = dict[str, nn.Module](), dict[str, str]()
    for name, norm in norms.items():
        conv = modules.get(memo[tree].get(name))
        if reason := _obstacle(conv, norm, tied):
            unfused[name] = reason
        elif conv is not None:
            pairs[name] = conv
    return pairs, unfused


def fuse(model: nn.Module, names: Iterable[str]) -> Iterator[tuple[str, nn.Module]]:
    """Fuse the norms `names`; yield every name of a changed module, with what is to stand there.

    Computes in float32 or wider. The new Parameters have the dtype, strides and requires_grad of the old.
    """
    pairs, everywhere = find_pairs(model)[0], list(model.named_modules(remove_duplicate=False))
    for name in names:
        conv: Any = pairs[name]
        norm: Any = model.get_submodule(name)
        old, dtype = conv.weight, torch.promote_types(conv.weight.dtype, torch.float32)
        held = (old, conv.bias, norm.running_mean, norm.running_var, norm.weight, norm.bias)
        wide: list[Any] = [None if each is None else each.detach().to(dtype) for each in held]
        fused: Any = fuse_conv_bn_weights
        new = fused(*wide[:4], norm.eps, *wide[4:], isinstance(conv, TRANSPOSED))
        conv.weight, conv.bias = (
            nn.Parameter(each.detach().to(old.dtype), requires_grad=old.requires_grad)
            for each in new
        )
        instead = {conv: conv, norm: nn.Identity().eval()}
        yield from ((each, instead[module]) for each, module in everywhere if module in instead)


def _names_of_pairs(model: nn.Module, prefix: str) -> Iterator[tuple[str, str]]:
    """Yield the names of a norm and of the convolution before it, in the module `prefix` of a model."""
    module, dot = model.get_submodule(prefix), f"{prefix}." if prefix else ""
    if not any(map(is_norm, module.modules())):
        return
    graphs = list(_graphs(module))
    parts = [name for name, inner in module.named_modules() if name and _has_hooks(inner)]
    if None in graphs:
        parts, graphs = [name for name, _ in module.named_children()], [fx.Graph()]
    for pair in sorted(set.intersection(*(set(_pairs_in(graph)) for graph in graphs))):
        two = [module.get_submodule(name) for name in pair]
        names = [n for n, m in model.named_modules(remove_duplicate=False) if m in two]
        # Neither has a use outside of this part.
        if is_norm(two[0]) and _is_convolution(two[1]) and all(n.startswith(dot) for n in names):
            yield dot + pair[0], dot + pair[1]
    for name in parts:
        yield from _names_of_pairs(model, dot + name)


class _Tracer(fx.Tracer):
    """Takes norms, convolutions and modules with hooks for one operation each, and `size` for any number.

    torch.fx replaces the call of all modules of the process: those of other threads run as they are.
    """

    size = 0

    def __init__(self) -> None:
        super().__init__()
        self.thread = get_ident()

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        is_other = get_ident() != self.thread
        return (
            forward(*args, **kwargs) if is_other else super().call_module(m, forward, args, kwargs)
        )

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: Any) -> Any:
        is_other = get_ident() != self.thread
        return attr_val if is_other else super().getattr(attr, attr_val, parameter_proxy_cache)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Value(node, self)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        is_one = is_norm(m) or _is_convolution(m) or _has_hooks(m)
        return is_one or super().is_leaf_module(m, module_qualified_name)


class _Value(fx.Proxy):
    def __int__(self) -> int:
        tracer: Any = self.tracer
        return tracer.size


def _graphs(module: nn.Module) -> Iterator[Any]:
    """Yield a call with the required arguments and odd sizes, and one with all arguments; None for no trace.

    A trace runs on a copy of the module tree, and on tensors without data.
    """
    parameters = inspect.signature(module.forward).parameters.values()
    defaults = {each.name: each.default for each in parameters if each.default is not each.empty}
    for size, constants in ((33, defaults), (32, {})):
        # Forward may write into buffers, and into other tensors.
        clone = copy_tree(module, lambda x: x if isinstance(x, nn.Parameter) else x.clone())
        tracer, graph = _Tracer(), None
        tracer.size = size
        for inner in map(vars, clone.modules()):
            inner["_compiled_call_impl"] = None
            inner.update((k, each.clone()) for k, each in inner.items() if isinstance(each, Tensor))
        if "forward" not in vars(module):  # torch.fx traces that of the class
            try:
                with PROCESS_STATE, ignored_warnings(), FakeTensorMode(allow_non_fake_inputs=True):
                    graph = tracer.trace(clone, constants or None)
            except Exception:  # the model's own code runs on proxies, and may raise anything
                graph = None
        held = tree_leaves([vars(inner) for inner in clone.modules()])
        # An attribute keeps a value of the trace, which others may read.
        yield None if any(isinstance(each, fx.Proxy) for each in held) else graph


def _pairs_in(graph: fx.Graph) -> Iterator[tuple[str, str]]:
    """Yield the names of a norm and of the module before it, if each is called once and used once."""
    calls = [node for node in graph.nodes if node.op == "call_module"]
    count = Counter(node.target for node in calls)
    # A weight that forward itself uses.
    read = {node.target.rpartition(".")[0] for node in graph.nodes if node.op == "get_attr"}
    once = [node for node in calls if count[node.target] == 1 and node.target not in read]
    for node in once:
        before = node.all_input_nodes
        if len(before) == 1 and before[0] in once and list(before[0].users) == [node]:
            yield node.target, before[0].target


def _tied(model: nn.Module) -> set[int]:
    """Return the ids of the modules that share a tensor with another module."""
    holders: dict[Any, set[int]] = {}
    for place in named_tensors(model):
        holders.setdefault(identity(place.tensor), set()).add(id(place.module))
    return {each for held_by in holders.values() if len(held_by) > 1 for each in held_by}


def _obstacle(conv: Any, norm: Any, tied: set[int]) -> str:
    """Return why a norm must not be fused with the convolution before it; empty if it may be."""
    if norm.training:
        return "in training mode; call model.eval() first"
    if norm.running_mean is None or norm.running_var is None:
        return "it has no running statistics"
    if conv is None:
        return "no convolution was found whose output goes only to this norm"
    pair = (conv, norm)
    if any(_has_hooks(each) or is_parametrized(each) or id(each) in tied for each in pair):
        return "it, or the convolution before it, has hooks, is parametrized or shares a tensor"
    if conv.training or conv.out_channels != norm.num_features:
        return "the convolution before it is in training mode, or has other channels"
    if isinstance(conv, TRANSPOSED) and conv.groups > 1:
        return "the transposed convolution before it is grouped"
    tensors = [each for module in pair for each in (*module.parameters(), *module.buffers())]
    if any(each.grad is not None or each._backward_hooks for each in tensors):
        return "they are being trained: a parameter holds a gradient or a hook"
    floats = [each for each in tensors if each.dim()]
    plain = (is_strided(each) and is_plain(each) and each.is_floating_point() for each in floats)
    if not all(plain) or len({each.device for each in floats}) > 1:
        return "their tensors are not plain floating-point ones, or on different devices"
    return ""


def _is_convolution(module: nn.Module) -> bool:
    # No linear layer: whether its features are the norm's channels depends on the input's rank.
    return isinstance(module, CONVOLUTIONS) and forward_code(module).alone


def _has_hooks(module: nn.Module) -> bool:
    return any(getattr(module, kind) for kind in _HOOKS)
