"""Find by a symbolic trace what follows a convolution, and fuse it with the batch norm after it."""

import copy
import inspect
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.fusion import fuse_conv_bn_weights
from torch.nn.utils.parametrize import is_parametrized
from torch.utils._pytree import tree_leaves

from prepare.core.model.forward_code import forward_code
from prepare.core.model.module_kinds import CONVOLUTIONS, TRANSPOSED
from prepare.core.model.module_tree import copy_tree
from prepare.core.model.tensors import identity, is_plain
from prepare.core.utils.process_state import PROCESS_STATE, ignored_warnings
from prepare.step import MEMO
from prepare.steps.repairs.fused import ACTIVATIONS, KINDS

_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_KINDS = {operator.add: "add", operator.iadd: "add", **KINDS}
_NAMES = {"LeakyReLU": "leaky_relu"}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def is_norm(module: nn.Module) -> bool:
    """Return whether this is a batch norm that runs torch's own code."""
    return isinstance(module, _NORMS) and forward_code(module).alone


def is_convolution(module: nn.Module) -> bool:
    """Return whether this is a convolution, or a repaired one, with a weight that nothing computes."""
    # No linear layer: whether its features are the norm's channels depends on the input's rank.
    is_one = isinstance(module, CONVOLUTIONS) and not is_parametrized(module)
    return is_one and forward_code(module).alone


def find_pairs(model: nn.Module) -> tuple[dict[str, nn.Module], dict[str, str]]:
    """Return the convolution to fuse with each norm, by its name, and why each other norm stays.

    A plan or `apply` traces a tree once.
    """
    memo, modules = MEMO.get({}), dict(model.named_modules())
    norms = {name: module for name, module in modules.items() if is_norm(module)}
    tree = tuple((name, type(module)) for name, module in modules.items())
    if norms and tree not in memo:
        found = traced_pairs(model, is_convolution, is_norm)
        memo[tree] = {second: first for first, second in found}
    convs = {name: modules.get(memo[tree].get(name)) for name in norms}
    uses = Counter(identity(p) for m in modules.values() for p in m.parameters(recurse=False))
    unfused = {name: _obstacle(convs[name], norm, uses) for name, norm in norms.items()}
    pairs = {name: conv for name, conv in convs.items() if conv and not unfused[name]}
    return pairs, {name: reason for name, reason in unfused.items() if reason}


def fuse(model: nn.Module, names: Iterable[str]) -> Iterator[tuple[str, nn.Module]]:
    """Fuse the norms `names`; yield every name of a changed module, with what is to stand there.

    Computes in float32 or wider. The new Parameters have the dtype and strides of the old.
    """
    pairs, everywhere = find_pairs(model)[0], list(model.named_modules(remove_duplicate=False))
    for name in names:
        conv: Any = pairs[name]
        norm = model.get_submodule(name)
        wide: Any = copy.deepcopy(norm).to(torch.promote_types(conv.weight.dtype, torch.float32))
        statistics = wide.running_mean, wide.running_var, wide.eps, wide.weight, wide.bias
        conv.weight, conv.bias = fuse_conv_bn_weights(
            conv.weight, conv.bias, *statistics, isinstance(conv, TRANSPOSED)
        )
        instead = {conv: conv, norm: nn.Identity().eval()}
        yield from ((each, instead[module]) for each, module in everywhere if module in instead)


def traced_pairs(
    model: nn.Module,
    is_first: Callable[[nn.Module], bool],
    is_second: Callable[[nn.Module], bool],
) -> Iterator[tuple[str, str]]:
    """Yield the names of two modules of which the second alone takes the first's output.

    Forward calls each of them once, and uses none of their tensors itself.
    """
    name_of = {module: name for name, module in model.named_modules()}
    everywhere = list(model.named_modules(remove_duplicate=False))
    for part, graph in graphs(model, lambda module: is_first(module) or is_second(module)):
        get = model.get_submodule(part).get_submodule
        called = {n: get(n.target) for n in graph.nodes if n.op == "call_module"}
        read = [get(n.target.rpartition(".")[0]) for n in graph.nodes if n.op == "get_attr"]
        outside = [m for name, m in everywhere if part and not name.startswith(f"{part}.")]
        uses = Counter([*called.values(), *read, *outside])
        for node, second in called.items():
            inputs = node.all_input_nodes
            first = called.get(inputs[0]) if len(inputs) == 1 else None
            if first is None or uses[first] > 1 or uses[second] > 1:
                continue
            if is_first(first) and is_second(second) and list(inputs[0].users) == [node]:
                yield name_of[first], name_of[second]


def find_followed(model: nn.Module) -> tuple[list[str], dict[nn.Module, tuple[str, ...]]]:
    """Return the names of the parts in which a convolution is followed, and by convolution what follows it.

    A plan or `apply` traces a tree once.
    """
    memo, modules = MEMO.get({}), dict(model.named_modules())
    tree = (*((name, type(module), has_hooks(module)) for name, module in modules.items()),)
    if tree not in memo:
        name_of = {module: name for name, module in modules.items()}
        calls, chains = Counter[str](), dict[str, dict[str, tuple[str, ...]]]()
        for part, graph in graphs(model, lambda m: isinstance(m, (*CONVOLUTIONS, _BatchNorm))):
            get, chains[part] = model.get_submodule(part).get_submodule, {}
            for node in graph.nodes:
                if node.op == "call_module":
                    calls[name := name_of[get(node.target)]] += 1
                    if isinstance(modules[name], CONVOLUTIONS):
                        chains[part][name] = _following(get, node)
                elif node.op == "get_attr":  # what reads a weight may write into it
                    calls[name_of[get(node.target.rpartition(".")[0])]] += 1
        memo[tree] = {
            part: {name: chain for name, chain in found.items() if calls[name] == 1}
            for part, found in chains.items()
        }
    found = memo[tree]
    followed = {modules[name]: chain for once in found.values() for name, chain in once.items()}
    return [part for part, once in found.items() if any(once.values())], followed


def _following(get: Callable[[str], nn.Module], conv: fx.Node) -> tuple[str, ...]:
    """Return what follows a convolution, with nothing between that might change its input in place."""
    chain, node = list[str](), conv
    module: Any = get(str(conv.target))
    while not (chain and chain[-1] in ACTIVATIONS):
        last, node = node, node.next
        while node.op == "get_attr":
            node = node.next
        if [*last.users] != [node]:
            break
        kind = _kind_of(get, node)
        # With groups torch does not fuse an addition.
        # After an addition torch fuses ReLU alone.
        fits = kind in ACTIVATIONS and ("add" not in chain or kind == "relu")
        if kind == "add" and "add" not in chain and not module.transposed and module.groups == 1:
            is_first = node.args[0] is last or node.target is operator.add
            fits = is_first and node.args.count(last) == 1
        if fits or (kind == "batch_norm" and not chain):
            chain.append(kind)
        elif kind != "identity":
            break
    return tuple(chain)


def _kind_of(get: Callable[[str], nn.Module], node: fx.Node) -> str:
    if node.op == "call_module":
        module: Any = get(str(node.target))
        name = type(module).__name__ if type(module).__module__.startswith("torch.nn.") else ""
        kind = "batch_norm" if isinstance(module, _BatchNorm) else _NAMES.get(name, name.lower())
        return kind if kind in ("batch_norm", "identity", *ACTIVATIONS) else ""
    method = getattr(Tensor, str(node.target), None) if node.op == "call_method" else None
    return _KINDS.get(method or node.target, "")


def graphs(
    model: nn.Module, is_one: Callable[[nn.Module], bool], name: str = ""
) -> Iterator[tuple[str, fx.Graph]]:
    """Yield the names and graphs of the largest parts of a model that can be traced.

    Modules that `is_one` accepts, and modules with hooks, are one operation; the latter are parts too. Left
    for its parts is a module with optional arguments, on which the graph may depend. A trace runs on a copy
    of the module tree, and on tensors without data.
    """
    module = model.get_submodule(name)
    if is_one(module) or not any(map(is_one, module.modules())):
        return
    # Forward may write into buffers, and into other tensors.
    clone = copy_tree(module, lambda x: x if isinstance(x, nn.Parameter) else x.clone())
    for inner in map(vars, clone.modules()):
        inner.update((key, each.clone()) for key, each in inner.items() if isinstance(each, Tensor))
    graph = None
    parameters = inspect.signature(module.forward).parameters.values()
    # torch.fx traces the forward of the class.
    if "forward" not in vars(module) and all(each.default is each.empty for each in parameters):
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        # The model's own code runs on proxies, and may raise anything.
        with suppress(Exception), PROCESS_STATE, ignored_warnings(), fake:
            graph = _Tracer(is_one).trace(clone)
    held = tree_leaves([vars(inner) for inner in clone.modules()])
    # An attribute keeps a value of the trace, which others may read.
    if graph is None or any(isinstance(each, fx.Proxy) for each in held):
        parts = [each for each, _ in module.named_children()]
    else:
        yield name, graph
        parts = [each for each, inner in module.named_modules() if each and has_hooks(inner)]
    for part in parts:
        yield from graphs(model, is_one, f"{name}.{part}".lstrip("."))


class _Tracer(fx.Tracer):
    """Takes some modules, and those with hooks, for one operation each.

    torch.fx replaces the call of all modules of the process: those of other threads run as they are.
    """

    def __init__(self, is_one: Callable[[nn.Module], bool]) -> None:
        super().__init__()
        self.is_one, self.thread = is_one, get_ident()

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        if get_ident() != self.thread:
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Value(node, self)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        is_one = self.is_one(m) or has_hooks(m)
        return is_one or super().is_leaf_module(m, module_qualified_name)


class _Value(fx.Proxy):
    """A value of a trace; networks that pad as TensorFlow does ask for a size as a number."""

    def __int__(self) -> int:
        return 33


def has_hooks(module: nn.Module) -> bool:
    """Return whether other code runs in a call of this module."""
    return any(getattr(module, kind) for kind in _HOOKS)


def _obstacle(conv: Any, norm: Any, uses: Counter[Any]) -> str:
    """Return why a norm must not be fused with the convolution before it; empty if it may be."""
    if norm.training:
        return "in training mode; call model.eval() first"
    if norm.running_mean is None or norm.running_var is None:
        return "it has no running statistics"
    if conv is None:
        return "no convolution was found whose output goes only to this norm"
    if conv.training or has_hooks(conv) or has_hooks(norm):
        return "it, or the convolution before it, has hooks or is in training mode"
    if any(uses[identity(each)] > 1 for each in conv.parameters()):
        return "the convolution before it shares a tensor"
    is_turned = isinstance(conv, TRANSPOSED) and conv.groups > 1
    if is_turned or conv.out_channels != norm.num_features:
        return "the convolution before it is grouped and transposed, or has other channels"
    tensors = [*conv.parameters(), *norm.parameters(), *norm.buffers()]
    if not all(map(is_plain, tensors)) or len({each.device for each in tensors}) > 1:
        return "their tensors are special ones, or on different devices"
    return ""
