"""Run a decision on rank 0 only: ranks that are prepared differently would train wrong numbers silently."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from prepare.errors import PrepareError, RefusedError

_Result = TypeVar("_Result")


def run_on_rank_zero(work: Callable[[], _Result]) -> _Result:
    """Run `work` on rank 0 and return its result on every rank; without torch.distributed, just run it.

    Raises:
        PrepareError: the error of rank 0; the other ranks raise a RefusedError that names rank 0.
    """
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return work()
    if distributed.get_world_size() == 1:
        return work()
    message: list[Any] = [None, None]  # the result, and the error as text
    if distributed.get_rank() != 0:
        distributed.broadcast_object_list(message)
        result, error_text = message
        if error_text is not None:
            raise RefusedError("rank 0", error_text, "see the output of rank 0")
        return result
    try:
        message = [work(), None]
    except Exception as error:
        text = str(error) if isinstance(error, PrepareError) else repr(error)
        distributed.broadcast_object_list([None, text])
        raise
    distributed.broadcast_object_list(message)
    return message[0]
