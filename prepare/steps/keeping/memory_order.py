"""Recognise the tensors that the operators of keep_layout serve, and how these lie in memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from prepare.core.model.transforms import is_transformed
from prepare.steps.repairs.base import FORMATS, not_a_view, to_channels_last

# torch's own classes of tensors that are nothing but tensors, and the modules of those of its tracers.
_CLASSES = (Tensor, torch.nn.Parameter)
_TRACERS = ("torch._subclasses.fake_tensor", "torch._subclasses.functional_tensor")


def is_tensor(x: Any) -> bool:
    """Return whether `x` is a tensor with strides, and not of a class that may treat calls in its own way."""
    kind = type(x)
    if kind not in _CLASSES and kind.__module__ not in _TRACERS:
        return False
    return x.layout is torch.strided and not x.is_nested


def is_dim(dim: Any, rank: int) -> bool:
    """Return whether `dim` is the number of a dimension, as torch takes it."""
    return type(dim) is int and -rank <= dim < rank


def are_sizes(sizes: Any, least: int = 0) -> bool:
    """Return whether all are integers, and none is less than `least`."""
    return all(isinstance(s, int) and not isinstance(s, bool) and s >= least for s in sizes)


def channels_last_of(x: Any) -> torch.memory_format | None:
    """Return the channels-last format that the order of the dimensions of `x` in memory has, and no other.

    The strides may have gaps (a slice) or be odd in dimensions of size 1 (`x[:, :, -1].unsqueeze(2)`).
    """
    if not is_tensor(x) or x.dim() not in FORMATS:
        return None
    shape, stride, last = x.shape, x.stride(), x.dim() - 1
    if shape[1] == 1:
        return None
    least, spatial = 0, False
    for dim in (1, *range(last, 1, -1), 0):
        if shape[dim] > 1:
            if stride[dim] < least or stride[dim] == 0:
                return None
            least = stride[dim] * shape[dim]
            spatial = spatial or dim > 1
    return FORMATS[x.dim()] if spatial else None


def canonical(x: Tensor) -> Tensor:
    """Return a view of a channels-last tensor whose dimensions of size 1 have the format's strides.

    torch's kernels read other strides there as contiguous. It copies nothing.
    """
    shape, stride, step = x.shape, x.stride(), 1
    for dim in (1, *range(x.dim() - 1, 1, -1), 0):
        if shape[dim] == 1 and stride[dim] != step:
            break
        step = stride[dim] * shape[dim]
    else:
        return x
    rows = x.movedim(1, -1)
    return rows.view(rows.shape).movedim(-1, 1)


def in_format(x: Tensor, memory_format: torch.memory_format) -> Tensor:
    """Return `x` in a channels-last format; a copy only if it is in another."""
    if channels_last_of(x) is memory_format:
        return canonical(x)
    return canonical(to_channels_last(x))


def alike_tensors(tensors: Any) -> list[Tensor] | None:
    """Return the tensors in the format of the largest, or of the first one; None without channels-last."""
    if not isinstance(tensors, (list, tuple)):  # Dynamo of torch 2.5 traces no `|`
        return None
    rank, size, memory_format = 0, 0, None
    # A loop, because torch.compile does not trace `max` with a key.
    for tensor in tensors:
        if not is_tensor(tensor):
            return None
        if tensor.numel() > size or (tensor.numel() == size and memory_format is None):
            rank, size, memory_format = tensor.dim(), tensor.numel(), channels_last_of(tensor)
    if memory_format is None:
        return None
    return [in_format(t, memory_format) if t.dim() == rank else t for t in tensors]


def without_empty(tensors: list[Tensor], dim: int) -> list[Tensor]:
    """Return the tensors to join without those that add nothing: to torch they are contiguous, and decide."""
    full = [tensor for tensor in tensors if tensor.numel()]
    if not full or len(full) == len(tensors):
        return tensors
    rest = [(*t.shape[:dim], *t.shape[dim % t.dim() + 1 :]) for t in tensors if t.dim()]
    is_alike = all(
        t.dtype == full[0].dtype and t.device == full[0].device and not t.requires_grad
        for t in tensors
        if not t.numel()
    )
    return full if is_alike and len({*rest}) == 1 else tensors


def leading(x: Tensor, count: int) -> int | None:
    """Return how many of the first dimensions have `count` elements together; None if there are none."""
    product = 1
    for dim, size in enumerate(x.shape):
        if product == count:
            return dim
        product *= size
    return x.dim() if product == count else None


def nearly_channels_last(x: Any) -> torch.memory_format | None:
    """Return channels-last if the channels of `x` are faster in memory than a spatial dimension."""
    if not is_tensor(x) or x.dim() not in FORMATS:
        return None
    return FORMATS[x.dim()] if is_slower(x, range(2, x.dim()), (1,)) else None


def is_slower(x: Tensor, some: Iterable[int], others: Iterable[int]) -> bool:
    """Return whether one of these dimensions has a larger stride than all others; none may be expanded."""

    def largest(dims: Iterable[int]) -> int:
        found = 0
        for dim in dims:
            if x.shape[dim] > 1 and x.stride(dim) > found:
                found = x.stride(dim)
        return found

    return 0 < largest(others) < largest(some)


def is_faster(x: Tensor, some: Iterable[int], others: Iterable[int]) -> bool:
    """Return whether one of these dimensions has a smaller stride than all others; none may be expanded."""

    def least(dims: Iterable[int]) -> int:
        found = 0
        for dim in dims:
            if x.shape[dim] > 1 and (found == 0 or x.stride(dim) < found):
                found = x.stride(dim)
        return found

    return 0 < least(some) < least(others)


def own(found: Any, arguments: Iterable[Any]) -> Any:
    """Return a result that is no view, as torch's are not, unless it is one of an argument."""
    if torch.compiler.is_compiling() or is_transformed() or not found._is_view():
        return found
    for each in arguments:
        if isinstance(each, Tensor) and found._base is (each._base if each._is_view() else each):
            return found
    return not_a_view(found)
