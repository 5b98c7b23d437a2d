"""Training in several processes: which one this is, and whether all of them hold a model alike."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from prepare.errors import Problem, RefusedError

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed import ProcessGroup

_SIDES = ("shape", "stride", "dtype", "device", "requires_grad")
_SHOWN = 3
_REMEDY = "prepare with one recipe on every rank, before DistributedDataParallel or any collective"


def rank() -> int:
    """The number of this process among those that train together; 0 where there is only one.

    As torch.distributed says once it is initialised, else as torchrun has put it into the environment.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank()
    number = os.environ.get("RANK", "")
    return int(number) if number.isdecimal() and "WORLD_SIZE" in os.environ else 0


def same_on_all_ranks(model: nn.Module, *, group: ProcessGroup | None = None) -> None:
    """Checks that every rank holds the same tensors: name, order, shape, strides, dtype, kind of device.

    Collectives ship memory as it lies. Where one rank is in another layout they mix elements up, or
    one rank raises and the others wait for it. Call this on every rank of `group` (all of them, by
    default) when the model is prepared, before it is wrapped: it is a collective itself, of a few
    bytes. Values are not compared. Without an initialised process group it does nothing.

    Raises:
        RefusedError: on every rank, naming the tensors and what they are where.
    """
    from torch import distributed

    if not (distributed.is_available() and distributed.is_initialized()):
        return
    ours = _described(model)
    digest = hashlib.sha256(repr(ours).encode()).hexdigest()
    if len(set(_gathered(digest, group))) > 1:
        raise RefusedError.of(_differences(_gathered(ours, group)))


def _gathered(what: Any, group: ProcessGroup | None) -> list[Any]:
    from torch import distributed

    found: list[Any] = [None] * distributed.get_world_size(group)
    distributed.all_gather_object(found, what, group=group)
    return found


def _described(model: nn.Module) -> dict[str, tuple[Any, ...]]:
    """Each tensor as plain data, by its name, in the order of the model."""
    from prepare.core.model.tensors import is_lazy, is_strided, named_tensors

    return {
        place.path: (
            None if is_lazy(place.tensor) else tuple(place.tensor.shape),
            place.tensor.stride() if is_strided(place.tensor) else None,
            str(place.tensor.dtype).removeprefix("torch."),
            place.tensor.device.type,
            place.tensor.requires_grad,
        )
        for place in named_tensors(model)
    }


def _differences(ranks: list[dict[str, tuple[Any, ...]]]) -> Iterator[Problem]:
    """What differs between the first rank and another, of the first few tensors."""
    first = ranks[0]
    other = next(
        index for index, held in enumerate(ranks) if list(held.items()) != list(first.items())
    )
    held = ranks[other]
    found = [
        (path, f"{side} is {one} on rank 0 and {two} on rank {other}")
        for path in first.keys() & held.keys()
        for side, one, two in zip(_SIDES, first[path], held[path], strict=True)
        if one != two
    ]
    found += [(path, f"is not there on rank {other}") for path in first.keys() - held.keys()]
    found += [(path, "is not there on rank 0") for path in held.keys() - first.keys()]
    found = sorted(found) or [("the model", f"its tensors stand in another order on rank {other}")]
    for path, wrong in found[:_SHOWN]:
        yield Problem(path, wrong, _REMEDY if (path, wrong) == found[-1] else "")
    if len(found) > _SHOWN:
        yield Problem("", f"and {len(found) - _SHOWN} more differences", _REMEDY)
