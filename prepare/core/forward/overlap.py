"""Find the tensors of a nested batch that share elements in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from prepare.core.forward.nested import LEAVES, items_of
from prepare.core.model.tensors import is_plain

if TYPE_CHECKING:
    from collections.abc import Iterator

# Elements of a memory for each one of the tensors in it, beyond which it is not gone through.
_SPARSEST = 4


def overlapping(values: Any) -> Iterator[list[Tensor]]:
    """Yield the tensors of one memory that have elements in common with others, in groups.

    Tensors that lie far apart in a memory whose elements cannot be marked count as such.
    """
    by_memory: dict[int, list[Tensor]] = {}
    for tensor in _each_tensor(values, set()):
        if is_plain(tensor) and tensor.numel():
            by_memory.setdefault(tensor.untyped_storage()._cdata, []).append(tensor)
    for found in by_memory.values():
        for group in _by_extent(found):
            if is_sparse(group):
                yield group
            elif shared := _sharing(group):
                yield shared


def _each_tensor(value: Any, seen: set[int]) -> Iterator[Tensor]:
    if isinstance(value, LEAVES) or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield value
    for _, item in items_of(value):
        yield from _each_tensor(item, seen)


def _by_extent(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    """Yield the tensors of one memory in groups whose first and last elements enclose one another's."""
    group: list[Tensor] = []
    for tensor in sorted(tensors, key=Tensor.storage_offset):
        if group and tensor.storage_offset() >= max(map(_end, group)):
            if len(group) > 1:
                yield group
            group = []
        group.append(tensor)
    if len(group) > 1:
        yield group


def _sharing(group: list[Tensor]) -> list[Tensor]:
    """Return the tensors that have an element in common with another of the group."""
    start, size = span(group)
    used, shared = torch.zeros(2, size, dtype=torch.bool)
    marks = []
    for tensor in group:
        marks.append(mark := torch.zeros_like(used))
        mark.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset() - start).fill_(True)
        shared |= used & mark
        used |= mark
    return [t for t, mark in zip(group, marks, strict=True) if (shared & mark).any()]


def span(group: list[Tensor]) -> tuple[int, int]:
    """Return the first element of a group in its memory, and the number up to the last."""
    start = min(tensor.storage_offset() for tensor in group)
    return int(start), int(max(map(_end, group)) - start)


def is_sparse(group: list[Tensor]) -> bool:
    """Return whether a group has few of the elements that it encloses."""
    return span(group)[1] > _SPARSEST * sum(tensor.numel() for tensor in group)


def _end(tensor: Tensor) -> int:
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return int(tensor.storage_offset()) + sum((size - 1) * step for size, step in steps) + 1
