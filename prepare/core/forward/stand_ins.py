"""Make replacements for the tensors of a model or of its inputs, with the same values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_map

from prepare.core.model.tensors import is_expanded, is_plain

if TYPE_CHECKING:
    from collections.abc import Callable


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
