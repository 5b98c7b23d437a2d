"""Lets rank 0 decide for all: ranks that prepare differently would train wrong numbers without a word."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from prepare.errors import PrepareError, RefusedError

_Found = TypeVar("_Found")


def decided_by_rank_0(work: Callable[[], _Found]) -> _Found:
    """What `work` gives on rank 0, on every rank; without torch.distributed simply what it gives.

    Raises:
        PrepareError: what rank 0 raised; the other ranks say that it was rank 0.
    """
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return work()
    if distributed.get_world_size() == 1:
        return work()
    said: list[Any] = [None, None]
    if distributed.get_rank() != 0:
        distributed.broadcast_object_list(said)
        found, wrong = said
        if wrong is not None:
            raise RefusedError("rank 0", wrong, "see what rank 0 says")
        return found
    try:
        said = [work(), None]
    except Exception as error:
        text = str(error) if isinstance(error, PrepareError) else repr(error)
        distributed.broadcast_object_list([None, text])
        raise
    distributed.broadcast_object_list(said)
    return said[0]
