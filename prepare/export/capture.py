"""Capture the program of a model with torch.export, and describe the inputs that it takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from prepare.core.model.tensors import name_of
from prepare.core.utils.process_state import ignored_warnings
from prepare.export.records import InputContract

if TYPE_CHECKING:
    from prepare.core.forward.call import Call


def capture(
    model: nn.Module,
    call: Call,
    dynamic: Sequence[int],
    *,
    largest: Callable[[int], int] | None = None,
) -> torch.export.ExportedProgram:
    """Return the program of `model`; the dimensions `dynamic` of its inputs may change.

    `largest` maps the size of such a dimension in `call` to the largest one that the program takes.
    """
    shapes = _dynamic_shapes(model, call, dynamic, largest) if dynamic else None
    with ignored_warnings(), torch.no_grad():
        return torch.export.export(
            model, call.args, call.kwargs, dynamic_shapes=shapes, strict=False
        )


def _dynamic_shapes(
    model: nn.Module,
    call: Call,
    dynamic: Sequence[int],
    largest: Callable[[int], int] | None,
) -> dict[str, Any]:
    """Return the argument `dynamic_shapes` of torch.export: by the names of the parameters."""
    import inspect

    def marks(value: Any) -> dict[int, Any] | None:
        if not isinstance(value, Tensor):
            return None
        hint: Any = torch.export.Dim.DYNAMIC
        return {
            each: hint(max=largest(value.shape[each])) if largest else hint
            for each in changing(value, call, dynamic)
        } or None

    bound = inspect.signature(model.forward).bind(*call.args, **call.kwargs).arguments
    return {name: pytree.tree_map(marks, value) for name, value in bound.items()}


def changing(tensor: Tensor, call: Call, dynamic: Iterable[int]) -> list[int]:
    """Return the dimensions of a tensor that may change; the first only if it is that of the batch."""
    is_batch = tensor.dim() > 0 and len(tensor) == call.batch
    return [each for each in dynamic if each < tensor.dim() and (each or is_batch)]


def inputs_of(model: nn.Module, call: Call, dynamic: Sequence[int]) -> tuple[InputContract, ...]:
    """Return the name, shape, dtype and strides of each tensor in a call."""
    import inspect

    bound = inspect.signature(model.forward).bind(*call.args, **call.kwargs).arguments
    inputs = []
    for path, value in pytree.tree_flatten_with_path(dict(bound))[0]:
        if isinstance(value, Tensor):
            free = changing(value, call, dynamic)
            inputs.append(
                InputContract(
                    name=".".join(
                        str(getattr(key, "key", getattr(key, "idx", key))) for key in path
                    ),
                    shape=tuple(None if d in free else n for d, n in enumerate(value.shape)),
                    dtype=name_of(value.dtype),
                    strides=value.stride(),
                )
            )
    return tuple(inputs)
