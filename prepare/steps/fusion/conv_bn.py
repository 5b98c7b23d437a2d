"""Find convolutions whose output is used by a batch norm only, and fuse the two."""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.fusion import fuse_conv_bn_weights

from prepare.core.model.forward_code import forward_code
from prepare.core.model.module_kinds import CONVOLUTIONS, TRANSPOSED
from prepare.core.model.tensors import identity, is_plain, is_strided, named_modules, named_tensors
from prepare.step import MEMO
from prepare.steps.fusion.symbolic_trace import has_hooks, trace

_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_NOT_FOUND = "no convolution was found whose output goes only to this norm"


@dataclass(frozen=True)
class Pair:
    """A convolution and the norm after it, each with every name it has in the model."""

    convolution: nn.Module
    norm: nn.Module
    convolution_names: tuple[str, ...]
    norm_names: tuple[str, ...]


@dataclass(frozen=True)
class FusionSearch:
    """The pairs that can be fused, by the norm's name, and the reason for each other batch norm."""

    pairs: dict[str, Pair] = field(default_factory=dict)
    unfused: dict[str, str] = field(default_factory=dict)


def is_norm(module: nn.Module | None) -> bool:
    """Return whether this is a batch norm that runs torch's own code."""
    return isinstance(module, _NORMS) and forward_code(module).alone


def is_convolution(module: nn.Module | None) -> bool:
    """Return whether this is a convolution that runs torch's own code.

    A linear layer is not: whether its features are the norm's channels depends on the input's rank.
    """
    return isinstance(module, CONVOLUTIONS) and forward_code(module).alone


def find_pairs(model: nn.Module) -> FusionSearch:
    """Find the pairs of `model` that can be fused; `model` is not changed.

    A convolution and a norm are a pair if a symbolic trace shows that the norm is called once, on the
    output of a convolution that is called once, and that this output has no other use. In modules that
    cannot be traced, the parts are traced one by one. In one plan or `apply` a tree is traced once before the
    step and, if norms are left, once after it, which shows that nothing is left to do.
    """
    names: dict[int, list[str]] = {}
    for name, module in named_modules(model):
        names.setdefault(id(module), []).append(name)
    norms = {name: module for name, module in model.named_modules() if is_norm(module)}
    if not norms:
        return FusionSearch()
    memo, tree = MEMO.get({}), _traced_content(model)
    if tree not in memo:
        found = _PairFinder(names).follow(model)
        memo[tree] = [(names[id(norm)][0], names[id(conv)][0]) for norm, conv in found]
    by_name = dict(named_modules(model))
    convolution_before = {id(by_name[norm]): by_name[conv] for norm, conv in memo[tree]}
    tied, search = _tied_modules(model), FusionSearch()
    for name, norm in norms.items():
        conv = convolution_before.get(id(norm))
        reason = _norm_obstacle(norm) or (_pair_obstacle(conv, norm, tied) if conv else _NOT_FOUND)
        if conv is None or reason:
            search.unfused[name] = reason
        else:
            search.pairs[name] = Pair(conv, norm, tuple(names[id(conv)]), tuple(names[id(norm)]))
    return search


def fuse(convolution: Any, norm: Any) -> None:
    """Give `convolution` the weight and bias that compute both modules; `norm` is not changed.

    Computes in float32 or wider. The new Parameters have the dtype, strides and requires_grad of the old.
    """
    old = convolution.weight
    dtype = torch.promote_types(old.dtype, torch.float32)
    mean, variance = norm.running_mean.to(dtype), norm.running_var.to(dtype)
    optional = (norm.weight, norm.bias, convolution.bias)
    scale, shift, bias = (None if tensor is None else tensor.to(dtype) for tensor in optional)
    with torch.no_grad():
        weight, bias = fuse_conv_bn_weights(
            old.to(dtype), bias, mean, variance, norm.eps, scale, shift,
            transpose=isinstance(convolution, TRANSPOSED),
        )  # fmt: skip
        convolution.weight = _parameter(torch.empty_like(old).copy_(weight), old)
        convolution.bias = _parameter(bias.to(old.dtype), old)


class _PairFinder:
    """Follow the calls of modules, and yield each norm with the convolution before it."""

    def __init__(self, names: dict[int, list[str]]) -> None:
        self.names = names

    def follow(self, module: nn.Module) -> Iterator[tuple[nn.Module, nn.Module]]:
        """Yield (norm, convolution) pairs from a trace of `module`, or of its parts."""
        inside = list(module.modules())
        if not (any(map(is_norm, inside)) and any(map(is_convolution, inside))):
            return
        if graphs := trace(module, lambda leaf: is_norm(leaf) or is_convolution(leaf)):
            in_all_graphs = set.intersection(*(set(_pairs_in_graph(graph)) for graph in graphs))
            for norm_name, conv_name in sorted(in_all_graphs):
                norm, conv = module.get_submodule(norm_name), module.get_submodule(conv_name)
                if self._is_pair_within(module, norm, conv):
                    yield norm, conv
            return
        for child in module.children():
            yield from self.follow(child)

    def _is_pair_within(self, root: nn.Module, norm: nn.Module, conv: nn.Module) -> bool:
        """Return whether these are a norm and a convolution, and have no name outside `root`."""
        if not (is_norm(norm) and is_convolution(conv)):
            return False
        prefixes = tuple(f"{name}." if name else "" for name in self.names[id(root)])
        names = [name for module in (norm, conv) for name in self.names[id(module)]]
        return all(name.startswith(prefixes) for name in names)


def _pairs_in_graph(graph: torch.fx.Graph) -> Iterator[tuple[str, str]]:
    """Yield the names of a norm and of the module before it, if each is called once and used once."""
    calls: dict[str, list[torch.fx.Node]] = {}
    read_directly = set()
    for node in graph.nodes:
        if node.op == "call_module":
            calls.setdefault(node.target, []).append(node)
        elif node.op == "get_attr":  # a weight that forward itself uses
            read_directly.add(node.target.rpartition(".")[0])
    called_once = {
        name: nodes[0]
        for name, nodes in calls.items()
        if len(nodes) == 1 and name not in read_directly
    }
    for name, node in called_once.items():
        inputs = node.all_input_nodes
        if len(inputs) != 1 or list(inputs[0].users) != [node]:
            continue
        before = str(inputs[0].target)
        if called_once.get(before) is inputs[0]:
            yield name, before


def _norm_obstacle(norm: Any) -> str:
    if norm.training:
        return "in training mode; call model.eval() first"
    if norm.running_mean is None or norm.running_var is None:
        return "it has no running statistics"
    return ""


def _pair_obstacle(conv: Any, norm: Any, tied: set[int]) -> str:
    """Return why a convolution and the norm after it must not be fused; empty if they may be."""
    if conv.training:
        return "the convolution before it is in training mode"
    if has_hooks(conv) or has_hooks(norm):
        return "it, or the convolution before it, has hooks"
    if any(parametrize.is_parametrized(module) for module in (conv, norm)):
        return "it, or the convolution before it, is parametrized"
    if any(id(module) in tied for module in (conv, norm)):
        return "it, or the convolution before it, shares a tensor with another module"
    tensors = [t for module in (conv, norm) for t in (*module.parameters(), *module.buffers())]
    floats = [tensor for tensor in tensors if tensor.dim()]
    if not all(is_strided(t) and is_plain(t) and t.is_floating_point() for t in floats):
        return "their tensors are not plain floating-point tensors"
    if len({tensor.device for tensor in floats}) > 1:
        return "they are on different devices"
    if any(tensor.grad is not None or _tensor_has_hooks(tensor) for tensor in tensors):
        return "they are being trained: a parameter holds a gradient or a hook"
    if isinstance(conv, TRANSPOSED) and conv.groups > 1:
        return "the transposed convolution before it is grouped"
    if conv.out_channels != norm.num_features:
        return "its number of channels differs from that of the convolution before it"
    return ""


def _tied_modules(model: nn.Module) -> set[int]:
    """Return the ids of the modules that hold a tensor that another module holds too."""
    holders: dict[Hashable, set[int]] = {}
    modules = dict(named_modules(model))
    for place in named_tensors(model):
        holders.setdefault(identity(place.tensor), set()).add(id(modules[place.owner]))
    return {holder for held_by in holders.values() if len(held_by) > 1 for holder in held_by}


def _tensor_has_hooks(tensor: Tensor) -> bool:
    return bool(tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None))


def _traced_content(model: nn.Module) -> tuple[Hashable, ...]:
    """Return what a trace depends on: names, classes, and attributes, which a copy of the tree shares."""
    return tuple(
        (name, type(module), has_hooks(module), *_attributes(module))
        for name, module in named_modules(model)
    )


def _attributes(module: nn.Module) -> Iterator[tuple[str, int]]:
    return ((key, id(value)) for key, value in vars(module).items() if not key.startswith("_"))


def _parameter(tensor: Tensor, like: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=like.requires_grad)
