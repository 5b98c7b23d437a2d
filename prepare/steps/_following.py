"""Find what follows each convolution: a batch norm, an addition and an activation, by a symbolic trace."""

import operator
from collections import Counter
from typing import Any

from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from prepare.core.model.module_kinds import CONVOLUTIONS
from prepare.steps._fusion import graphs
from prepare.steps.repairs.fused import ACTIVATIONS, KINDS

_KINDS = {operator.add: "add", operator.iadd: "add", **KINDS}
_NAMES = {"ReLU6": "hardtanh", "LeakyReLU": "leaky_relu"}


def find_followed(model: nn.Module) -> tuple[list[str], dict[nn.Module, tuple[str, ...]]]:
    """Return the names of the parts that were traced, and by convolution what follows it."""
    parts, calls = list[str](), Counter[nn.Module]()
    followed = dict[nn.Module, tuple[str, ...]]()
    for name, graph in graphs(
        model, lambda module: isinstance(module, (*CONVOLUTIONS, _BatchNorm))
    ):
        part = model.get_submodule(name)
        parts.append(name)
        for node in graph.nodes:
            if node.op == "call_module":
                module = part.get_submodule(node.target)
                calls[module] += 1
                if isinstance(module, CONVOLUTIONS):
                    followed[module] = _following(part, node)
            elif node.op == "get_attr":  # what reads a weight may write into it
                calls[part.get_submodule(node.target.rpartition(".")[0])] += 1
    return parts, {conv: found for conv, found in followed.items() if calls[conv] == 1}


def _following(part: nn.Module, conv: fx.Node) -> tuple[str, ...]:
    """Return what follows a convolution, with nothing between that might change its input in place."""
    chain, node = list[str](), conv
    module: Any = part.get_submodule(str(conv.target))
    while not (chain and chain[-1] in ACTIVATIONS):
        last, node = node, node.next
        while node.op == "get_attr":
            node = node.next
        if [*last.users] != [node]:
            break
        kind = _kind_of(part, node)
        # After an addition oneDNN knows ReLU alone, and with groups torch fuses no addition.
        fits = kind in ACTIVATIONS and ("add" not in chain or kind == "relu")
        if kind == "add":
            is_first = node.args[0] is last or node.target is operator.add
            fits = (
                not module.transposed
                and module.groups == 1
                and "add" not in chain
                and is_first
                and node.args.count(last) == 1
            )
        if fits or (kind == "batch_norm" and not chain):
            chain.append(kind)
        elif kind != "identity":
            break
    return tuple(chain)


def _kind_of(part: nn.Module, node: fx.Node) -> str:
    if node.op == "call_module":
        module: Any = part.get_submodule(str(node.target))
        name = type(module).__name__ if type(module).__module__.startswith("torch.nn.") else ""
        kind = "batch_norm" if isinstance(module, _BatchNorm) else _NAMES.get(name, name.lower())
        return kind if kind in ("batch_norm", "identity", *ACTIVATIONS) else ""
    method = getattr(Tensor, str(node.target), None) if node.op == "call_method" else None
    return _KINDS.get(method or node.target, "")
