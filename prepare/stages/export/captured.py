"""Capture a model as a program of torch.export, and describe the inputs of it."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from prepare.core.forward.unchanged import unchanged
from prepare.core.model.tensors import name_of
from prepare.core.utils.process_state import ignored_warnings
from prepare.stages.export.records import InputContract

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from prepare.core.forward.call import Call


def capture(model: nn.Module, call: Call, dynamic: Sequence[int]) -> torch.export.ExportedProgram:
    """Return the program of `model`; the dimensions `dynamic` of its inputs may change."""

    def marks(value: Any) -> dict[int, Any] | None:
        if not isinstance(value, Tensor):
            return None
        return dict.fromkeys(_changing(value, call, dynamic), torch.export.Dim.DYNAMIC) or None

    shapes = pytree.tree_map(marks, _bound(model, call)) if dynamic else None
    with unchanged(model, call.args, call.kwargs), ignored_warnings(), torch.no_grad():
        return torch.export.export(
            model, call.args, call.kwargs, dynamic_shapes=shapes, strict=False
        )


def inputs_of(model: nn.Module, call: Call, dynamic: Sequence[int]) -> tuple[InputContract, ...]:
    """Return the name, shape, dtype and strides of each tensor in a call."""
    inputs = []
    for path, value in pytree.tree_flatten_with_path(_bound(model, call))[0]:
        if isinstance(value, Tensor):
            free = _changing(value, call, dynamic)
            names = (str(getattr(key, "key", getattr(key, "idx", key))) for key in path)
            inputs.append(
                InputContract(
                    name=".".join(names),
                    shape=tuple(None if d in free else n for d, n in enumerate(value.shape)),
                    dtype=name_of(value.dtype),
                    strides=value.stride(),
                )
            )
    return tuple(inputs)


def _bound(model: nn.Module, call: Call) -> dict[str, Any]:
    """Return the arguments of a call by the names of the parameters."""
    return dict(inspect.signature(model.forward).bind(*call.args, **call.kwargs).arguments)


def _changing(tensor: Tensor, call: Call, dynamic: Iterable[int]) -> list[int]:
    """Return the dimensions of a tensor that may change; the first only if it is that of the batch."""
    is_batch = tensor.dim() > 0 and len(tensor) == call.batch
    return [each for each in dynamic if each < tensor.dim() and (each or is_batch)]
