"""Run a model on replacements for its tensors, so that the model stays unchanged."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_map

from prepare.core.model.module_tree import Snapshot
from prepare.core.model.tensors import is_expanded, is_plain


@contextmanager
def standing_in(
    model: nn.Module, stand_in: Callable[[Tensor], Tensor]
) -> Iterator[dict[int, Tensor]]:
    """Replace every tensor by `stand_in(tensor)` inside the block; restore the model afterwards.

    Tables, attributes, hooks and training mode are restored, also if the forward raises or assigns.
    Yields the stand-ins by the id of their originals. Not torch.func.functional_call: it does not
    replace plain attributes (an LSTM's list of weights) and rejects scripted modules. Scripted
    modules keep their tensors here, and the values and gradients of these are restored.
    """
    snapshot, stand_ins = Snapshot(model), dict[int, Tensor]()
    parameters = [(p, p.grad) for p in model.parameters()]
    scripted = [(t, t.detach().clone()) for t in _scripted_buffers(model)]

    def swap(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if id(value) not in stand_ins:
            stand_ins[id(value)] = stand_in(value)
        return stand_ins[id(value)]

    try:
        for parameter, _ in parameters:
            parameter.grad = None
        for module in model.modules():
            if not isinstance(module, torch.jit.ScriptModule):
                _swap_all(module, swap)
        yield stand_ins
    finally:
        snapshot.restore()
        with torch.no_grad():
            for buffer, values in scripted:
                buffer.copy_(values)
        for parameter, gradient in parameters:
            parameter.grad = gradient


def lazy_parameter(model: nn.Module) -> str | None:
    """Return the name of an uninitialized parameter or buffer, or None."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return next((name for name, tensor in named if is_lazy(tensor)), None)


def real_stand_in(tensor: Tensor) -> Tensor:
    """Return a parameter that shares the values but not the gradient, or a copy of a buffer."""
    if isinstance(tensor, nn.Parameter):
        alias = tensor.detach()
        return nn.Parameter(alias, tensor.requires_grad) if is_plain(tensor) else tensor
    return copy_of(tensor)


def copy_of(tensor: Tensor) -> Tensor:
    """Return a copy with the exact strides of the original, as a leaf."""
    if not is_plain(tensor) or is_expanded(tensor):
        return tensor.detach().requires_grad_(tensor.requires_grad)
    with torch.no_grad():
        copy = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
        ).copy_(tensor)
    return copy.requires_grad_(tensor.requires_grad)


def stand_ins_for(values: Any, stand_in: Callable[[Tensor], Tensor]) -> Any:
    """Return the same nested lists, tuples and mappings, with every tensor replaced."""
    return tree_map(lambda leaf: stand_in(leaf) if isinstance(leaf, Tensor) else leaf, values)


def _swap_all(module: nn.Module, swap: Callable[[Any], Any]) -> None:
    for table in (module._parameters, module._buffers):
        table.update({name: swap(tensor) for name, tensor in table.items()})
    attributes = vars(module)
    for key, value in list(attributes.items()):
        if isinstance(value, Tensor):
            attributes[key] = swap(value)
        elif type(value) is list and any(isinstance(item, Tensor) for item in value):
            attributes[key] = [swap(item) for item in value]


def _scripted_buffers(model: nn.Module) -> Iterator[Tensor]:
    for module in model.modules():
        if isinstance(module, torch.jit.ScriptModule):
            yield from module.buffers()
