"""The inputs that an artefact is called with: one batch in several layouts, and other batch sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from prepare.core.model.memory_format import canonical_stride
from prepare.verify.inputs import resized

CONTIGUOUS = "contiguous"
_LAST = {4: "channels_last", 5: "channels_last_3d"}

if TYPE_CHECKING:
    from prepare.core.forward.call import Call


@dataclass(frozen=True)
class InputCase:
    """One call in one layout; `promised` says that the artefact has to take it."""

    layout: str
    call: Call
    promised: bool


def input_cases(call: Call, *, dynamic_batch: bool) -> Iterator[InputCase]:
    """Yield the call in every layout, then with one and two samples."""
    for layout, change in _LAYOUTS.items():
        changed = call.map(change)
        if layout == CONTIGUOUS or _strides(changed) != _strides(call):
            yield InputCase(layout, changed, promised=layout == CONTIGUOUS)
    for size in (1, 2):
        smaller = resized(call, size)
        if smaller is not call:
            yield InputCase(CONTIGUOUS, smaller.map(contiguous), promised=dynamic_batch)


def _strides(call: Call) -> list[tuple[int, ...]]:
    return [tensor.stride() for tensor in call.tensors()]


def contiguous(tensor: Tensor) -> Tensor:
    """Return a contiguous copy."""
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def _channels_last(tensor: Tensor) -> Tensor:
    if tensor.dim() not in _LAST:
        return contiguous(tensor)
    return _with_strides(tensor, canonical_stride(tensor.shape, _LAST[tensor.dim()]))


def _transposed(tensor: Tensor) -> Tensor:
    """Return the values in memory in the opposite order of dimensions."""
    order = tuple(reversed(range(tensor.dim())))
    return contiguous(tensor.permute(order)).permute(order)


def _gaps(tensor: Tensor) -> Tensor:
    """Return the values in every second place of a row."""
    if not tensor.dim():
        return contiguous(tensor)
    *sizes, last = tensor.shape
    return tensor.new_zeros((*sizes, 2 * last))[..., ::2].copy_(tensor.detach())


def _with_strides(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    fresh = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
    return fresh.copy_(tensor.detach())


_LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    CONTIGUOUS: contiguous,
    "channels_last": _channels_last,
    "transposed": _transposed,
    "gaps": _gaps,
}
