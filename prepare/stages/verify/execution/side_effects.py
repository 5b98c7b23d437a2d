"""Find what a call does beside its results: changed inputs, and outputs in memory that is written again."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from prepare.core.model.tensors import is_plain

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping


def changed(before: Iterable[Tensor], after: Iterable[Tensor]) -> set[str]:
    """Return `input 0`, ... for each tensor whose numbers differ from those of its copy."""
    pairs = enumerate(zip(before, after, strict=True))
    return {f"input {index}" for index, pair in pairs if not _are_equal(*pair)}


def versions_of(model: nn.Module) -> dict[int, int]:
    """Return how often each buffer and attribute of a model was written in place, by its id."""
    return {id(tensor): tensor._version for tensor in _kept_tensors(model)}


def kept_outputs(
    model: nn.Module, before: Mapping[int, int], outputs: Mapping[str, Tensor]
) -> set[str]:
    """Return the outputs in the memory of tensors that the model keeps, and has written since `before`."""
    written = {
        _memory(tensor)
        for tensor in _kept_tensors(model)
        if tensor._version > before.get(id(tensor), 0)
    }
    return _in_memory(outputs, written)


def shared_outputs(
    model: nn.Module, first: Mapping[str, Tensor | None], second: Mapping[str, Tensor | None]
) -> set[str]:
    """Return the outputs of a second call that lie in the memory of the first one's, which are still there.

    The model's own parameters and buffers may be returned by each call.
    """
    own = {_memory(tensor) for tensor in chain(model.parameters(), model.buffers())}
    return _in_memory(second, {_memory(tensor) for tensor in first.values()} - own)


def _in_memory(outputs: Mapping[str, Tensor | None], memory: set[int]) -> set[str]:
    return {name for name, tensor in outputs.items() if _memory(tensor) in memory - {0}}


def _kept_tensors(model: nn.Module) -> Iterator[Tensor]:
    for module in model.modules():
        for value in (*module._buffers.values(), *vars(module).values()):
            if isinstance(value, Tensor) and is_plain(value) and not value.is_inference():
                yield value


def _memory(tensor: Tensor | None) -> int:
    """Return the address of a tensor's memory; 0 if it has none of its own."""
    if tensor is None or not is_plain(tensor):
        return 0
    return tensor.untyped_storage().data_ptr()


def _are_equal(first: Tensor, second: Tensor) -> bool:
    if not is_plain(first) or not is_plain(second):
        return True  # cannot be told
    return torch.equal(first, second) or bool(
        ((first == second) | (first != first) & (second != second)).all()  # noqa: PLR0124  NaN
    )
