"""The inputs of a bench: a pool of fresh ones, made before anything is timed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from prepare.core.forward.nested import arguments, map_tensors, tensors_in
from prepare.core.forward.stand_ins import copy_of
from prepare.core.model.tensors import is_expanded, is_plain

_MOST, _LEAST, _BYTES = 8, 2, 2**28


def make_pool(batch: Any, *, seed: int) -> list[Any]:
    """A few inputs like `batch`, or what it gives where it is a function; as many as fit into 256 MiB.

    Those like `batch` hold its own values, shifted by a random number of places: so they stay in its
    range, and no number becomes one that is slower to compute with. Integers and booleans stay as
    they are, as they may be indices or masks.
    """
    first = batch() if callable(batch) else batch
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(first))
    count = max(_LEAST, min(_MOST, _BYTES // max(1, size)))
    if callable(batch):
        return [first, *(batch() for _ in range(count - 1))]
    generator = torch.Generator("cpu").manual_seed(seed)
    return [
        map_tensors(lambda tensor: _shifted(tensor, generator), fresh(first)) for _ in range(count)
    ]


def fresh(batch: Any) -> Any:
    """A copy: a model may write into its input."""
    return map_tensors(copy_of, batch)


def batch_size(batch: Any) -> int | None:
    """The first size of the first tensor; None where there is none."""
    args, kwargs = arguments(batch)
    first = next(tensors_in([*args, *kwargs.values()]), None)
    return None if first is None or first.dim() == 0 else first.shape[0]


@torch.no_grad()
def _shifted(tensor: Tensor, generator: torch.Generator) -> Tensor:
    if not tensor.is_floating_point() or not is_plain(tensor) or is_expanded(tensor):
        return tensor
    if tensor.numel() > 1:
        places = int(torch.randint(1, tensor.numel(), (), generator=generator, device="cpu"))
        # In place, so that the strides stay as the user gave them.
        tensor.copy_(tensor.reshape(-1).roll(places).view(tensor.shape))
    return tensor
