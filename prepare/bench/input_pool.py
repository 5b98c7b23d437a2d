"""A pool of distinct inputs, made before anything is timed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from prepare.core.forward.nested import arguments, map_tensors, tensors_in
from prepare.core.forward.stand_ins import copy_of
from prepare.core.model.tensors import is_expanded, is_plain

_MAX_INPUTS, _MIN_INPUTS, _MAX_BYTES = 8, 2, 2**28


def make_pool(batch: Any, *, seed: int) -> list[Any]:
    """Return 2 to 8 inputs like `batch`, as many as fit into 256 MiB.

    If `batch` is a function, each input is one of its results. Otherwise each input has the values of
    `batch`, rolled by a random number of places: they stay in its range, and no value becomes one that
    is slower to compute with (denormal). Integers and booleans are not changed, as they may be indices
    or masks.
    """
    first = batch() if callable(batch) else batch
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(first))
    count = max(_MIN_INPUTS, min(_MAX_INPUTS, _MAX_BYTES // max(1, size)))
    if callable(batch):
        return [first, *(batch() for _ in range(count - 1))]
    generator = torch.Generator("cpu").manual_seed(seed)
    return [
        map_tensors(lambda tensor: _roll(tensor, generator), copy_batch(first))
        for _ in range(count)
    ]


def copy_batch(batch: Any) -> Any:
    """Copy every tensor of a batch: a model may write into its input."""
    return map_tensors(copy_of, batch)


def batch_size(batch: Any) -> int | None:
    """Return the first size of the first tensor, or None if there is no such tensor or size."""
    args, kwargs = arguments(batch)
    first = next(tensors_in([*args, *kwargs.values()]), None)
    return None if first is None or first.dim() == 0 else first.shape[0]


@torch.no_grad()
def _roll(tensor: Tensor, generator: torch.Generator) -> Tensor:
    if not tensor.is_floating_point() or not is_plain(tensor) or is_expanded(tensor):
        return tensor
    if tensor.numel() > 1:
        places = int(torch.randint(1, tensor.numel(), (), generator=generator, device="cpu"))
        # In place, so that the strides stay as the user gave them.
        tensor.copy_(tensor.reshape(-1).roll(places).view(tensor.shape))
    return tensor
