"""Finds the convolutions whose output goes into a batch norm and nowhere else, and makes one of both."""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.fusion import fuse_conv_bn_weights

from prepare.core.model.repair_marker import is_repair
from prepare.core.model.tensors import identity, is_plain, is_strided, named_modules, named_tensors
from prepare.steps.fusion.symbolic_trace import has_hooks, trace

_CONVOLUTIONS = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
# A subclass that computes something of its own is neither.
_METHODS = {
    getattr(cls, name, None)
    for cls in (*_CONVOLUTIONS, *_NORMS)
    for name in ("forward", "_conv_forward")
}
_NOT_FOUND = "no convolution was found that gives its output to it alone"


@dataclass(frozen=True)
class Pair:
    """A convolution and the norm after it, each with every name it has in the model."""

    convolution: nn.Module
    norm: nn.Module
    convolution_names: tuple[str, ...]
    norm_names: tuple[str, ...]


@dataclass(frozen=True)
class Found:
    """What can be fused, by the norm's name; and why each of the other batch norms cannot."""

    pairs: dict[str, Pair] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)


def is_norm(module: nn.Module) -> bool:
    """Whether this is a batch norm that computes what torch's does."""
    return isinstance(module, _NORMS) and _is_as_torch(module)


def is_convolution(module: nn.Module) -> bool:
    """Whether this is a convolution that computes what torch's does.

    A linear layer is none: whether its features are the norm's channels depends on the input's rank.
    """
    return isinstance(module, _CONVOLUTIONS) and _is_as_torch(module)


def find_pairs(model: nn.Module) -> Found:
    """The pairs of `model`; touches nothing.

    A pair is one if a symbolic trace shows the norm to be called once, on the output of a convolution
    that is called once, and this output to be used nowhere else. Modules that cannot be traced are looked at
    part by part; of those, neighbours in an nn.Sequential are a pair as well.
    """
    places: dict[int, list[str]] = {}
    for name, module in named_modules(model):
        places.setdefault(id(module), []).append(name)
    norms = {name: module for name, module in model.named_modules() if is_norm(module)}
    if not norms:
        return Found()
    before = {id(norm): conv for norm, conv in _Look(places).follow(model)}
    tied, found = _tied(model), Found()
    for name, norm in norms.items():
        conv = before.get(id(norm))
        why = _unfit_norm(norm) or (_unfit(conv, norm, tied) if conv else _NOT_FOUND)
        if why:
            found.left[name] = why
        else:
            names = (tuple(places[id(one)]) for one in (conv, norm))
            found.pairs[name] = Pair(conv, norm, *names)
    return found


def fuse(convolution: nn.Module, norm: nn.Module) -> None:
    """Gives `convolution` the weight and bias that do what both do; `norm` stays as it is.

    Computed in float32 at least; new Parameters with the dtype, strides and requires_grad of the old.
    """
    old = convolution.weight
    kind = torch.promote_types(old.dtype, torch.float32)
    read = (norm.running_mean, norm.running_var, norm.weight, norm.bias)
    mean, variance, scale, shift = (None if each is None else each.to(kind) for each in read)
    bias = None if convolution.bias is None else convolution.bias.to(kind)
    with torch.no_grad():
        weight, bias = fuse_conv_bn_weights(
            old.to(kind), bias, mean, variance, norm.eps, scale, shift,
            transpose=isinstance(convolution, _TRANSPOSED),
        )  # fmt: skip
        convolution.weight = _parameter(torch.empty_like(old).copy_(weight), old)
        convolution.bias = _parameter(bias.to(old.dtype), old)


class _Look:
    """Follows the calls of modules; yields (norm, convolution before it)."""

    def __init__(self, places: dict[int, list[str]]) -> None:
        self.places = places

    def follow(self, module: nn.Module) -> Iterator[tuple[nn.Module, nn.Module]]:
        inside = list(module.modules())
        if not (any(map(is_norm, inside)) and any(map(is_convolution, inside))):
            return
        if graphs := trace(module, lambda one: is_norm(one) or is_convolution(one)):
            names = set.intersection(*(set(_in_graph(graph)) for graph in graphs))
            for one, other in sorted(names):
                norm, conv = module.get_submodule(one), module.get_submodule(other)
                if self._only_in(module, norm, conv):
                    yield norm, conv
            return
        for child in module.children():
            yield from self.follow(child)
        if type(module).forward is nn.Sequential.forward:
            yield from self._neighbours(module)

    def _neighbours(self, sequence: nn.Module) -> Iterator[tuple[nn.Module, nn.Module]]:
        children = list(sequence._modules.values())
        times = len(self.places[id(sequence)])
        for conv, norm in pairwise(children):
            once = all(len(self.places[id(one)]) == times for one in (conv, norm))
            if once and self._only_in(sequence, norm, conv):
                yield norm, conv

    def _only_in(self, root: nn.Module, norm: nn.Module, conv: nn.Module) -> bool:
        """Whether these are what they should be, and nothing outside `root` has them under a name."""
        if not (is_norm(norm) and is_convolution(conv)):
            return False
        inside = tuple(f"{name}." if name else "" for name in self.places[id(root)])
        return all(name.startswith(inside) for one in (norm, conv) for name in self.places[id(one)])


def _in_graph(graph: torch.fx.Graph) -> Iterator[tuple[str, str]]:
    """The names of a norm and of what is called before it, where each is called once and used once."""
    calls: dict[str, list[torch.fx.Node]] = {}
    read = set()
    for node in graph.nodes:
        if node.op == "call_module":
            calls.setdefault(node.target, []).append(node)
        elif node.op == "get_attr":  # a weight that forward itself uses
            read.add(node.target.rpartition(".")[0])
    once = {name: nodes[0] for name, nodes in calls.items() if len(nodes) == 1 and name not in read}
    for name, node in once.items():
        given = node.all_input_nodes
        before = given[0].target if len(given) == 1 else None
        if once.get(before) is given[0] and list(given[0].users) == [node]:
            yield name, before


def _unfit_norm(norm: nn.Module) -> str:
    if norm.training:
        return "in training mode; call model.eval() first"
    if norm.running_mean is None or norm.running_var is None:
        return "it keeps no running statistics"
    return ""


def _unfit(conv: nn.Module, norm: nn.Module, tied: set[int]) -> str:
    """Why these two must not be fused although one follows the other; empty where they may be."""
    if conv.training:
        return "the convolution before it is in training mode"
    if has_hooks(conv) or has_hooks(norm):
        return "it, or the convolution before it, has hooks"
    if any(parametrize.is_parametrized(one) for one in (conv, norm)):
        return "it, or the convolution before it, is parametrized"
    if any(id(one) in tied for one in (conv, norm)):
        return "it, or the convolution before it, shares a tensor with another module"
    tensors = [t for one in (conv, norm) for t in (*one.parameters(), *one.buffers())]
    floats = [tensor for tensor in tensors if tensor.dim()]
    if not all(is_strided(t) and is_plain(t) and t.is_floating_point() for t in floats):
        return "their tensors are no plain floating-point numbers"
    if len({tensor.device for tensor in floats}) > 1:
        return "they lie on different devices"
    if any(tensor.grad is not None or _has_hooks(tensor) for tensor in tensors):
        return "they are being trained: a parameter holds a gradient or a hook"
    if isinstance(conv, _TRANSPOSED) and conv.groups > 1:
        return "the transposed convolution before it is in groups"
    if conv.out_channels != norm.num_features:
        return "it has another number of channels than the convolution before it"
    return ""


def _tied(model: nn.Module) -> set[int]:
    """The modules, by id, that hold a tensor which another module holds too."""
    holders: dict[Hashable, set[int]] = {}
    modules = dict(named_modules(model))
    for place in named_tensors(model):
        holders.setdefault(identity(place.tensor), set()).add(id(modules[place.owner]))
    return {holder for held in holders.values() if len(held) > 1 for holder in held}


def _has_hooks(tensor: Tensor) -> bool:
    return bool(tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None))


def _is_as_torch(module: nn.Module) -> bool:
    """Whether its code is torch's own, or that of a repair of ours, which computes the same."""
    classes = type(module).__mro__
    cls = next(each for each in classes if not is_repair(each))
    methods = (cls.forward, getattr(cls, "_conv_forward", None))
    return all(method in _METHODS for method in methods) and "forward" not in vars(module)


def _parameter(tensor: Tensor, like: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=like.requires_grad)
