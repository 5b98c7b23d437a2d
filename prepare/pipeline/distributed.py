"""Distributed training: the rank, work for all ranks on one, and a check that they hold the same model."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from prepare.errors import PrepareError, Problem, RefusedError, raise_problems

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed import ProcessGroup

_Result = TypeVar("_Result")
_REMEDY = "prepare with one recipe on every rank, before DistributedDataParallel or any collective"


def rank() -> int:
    """Return the rank of this process; 0 if there is only one.

    From torch.distributed if it is initialised, else from the environment that torchrun sets.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank())
    number = os.environ.get("RANK", "")
    return int(number) if number.isdecimal() and "WORLD_SIZE" in os.environ else 0


def on_rank_zero(work: Callable[[], _Result]) -> _Result:
    """Run `work` on rank 0 and return its result on every rank; without torch.distributed, just run it.

    Ranks that are prepared differently would train wrong numbers silently.

    Raises:
        PrepareError: the error of rank 0; the other ranks raise a RefusedError that names rank 0.
        KeyboardInterrupt: rank 0 was stopped.
    """
    from torch import distributed

    is_alone = not (distributed.is_available() and distributed.is_initialized())
    if is_alone or distributed.get_world_size() == 1:
        return work()
    # The result, the error as text, and whether that ends the program.
    message: list[Any] = [None, None, False]
    if distributed.get_rank() == 0:
        try:
            message[0] = work()
        except BaseException as error:
            text = str(error) if isinstance(error, PrepareError) else repr(error)
            with suppress(Exception):  # another rank that has ended as well
                distributed.broadcast_object_list([None, text, not isinstance(error, Exception)])
            raise
    distributed.broadcast_object_list(message)
    if message[2]:
        raise KeyboardInterrupt(f"rank 0 was stopped: {message[1]}")
    if message[1] is not None:
        raise RefusedError("rank 0", message[1], "see the output of rank 0")
    result: _Result = message[0]
    return result


def same_on_all_ranks(model: nn.Module, *, group: ProcessGroup | None = None) -> None:
    """Check that every rank holds the same tensors: name, order, shape, strides, dtype, device type.

    Collectives send memory without regard to strides. If one rank has another layout, elements are
    mixed up, or one rank raises and the others wait for it. Call this on every rank of `group` (by
    default all ranks) after preparing the model and before wrapping it: it is itself a collective,
    of some bytes a tensor. Values are not compared. Without an initialised process group it does nothing.

    Raises:
        RefusedError: on every rank, with the tensors and their state on both ranks.
    """
    from torch import distributed

    if not (distributed.is_available() and distributed.is_initialized()):
        return
    ranks: list[Any] = [None] * distributed.get_world_size(group)
    distributed.all_gather_object(ranks, _described(model), group=group)
    raise_problems(RefusedError, _differences(ranks))


def _described(model: nn.Module) -> dict[str, str]:
    """Return the state of each tensor as text, by its name, in the order of the model."""
    from prepare.core.model.tensors import is_lazy, named_tensors, stride_of

    described = {}
    for path, tensor in ((place.path, place.tensor) for place in named_tensors(model)):
        shape = None if is_lazy(tensor) else tuple(tensor.shape)
        dtype = str(tensor.dtype).removeprefix("torch.")
        trained = "trained" if tensor.requires_grad else "frozen"
        device, stride = tensor.device.type, stride_of(tensor)
        described[path] = f"{dtype} of shape {shape}, stride {stride}, {device}, {trained}"
    return described


def _differences(ranks: list[dict[str, str]]) -> Iterator[Problem]:
    """Yield the first difference between the first rank and another."""
    first = ranks[0]
    for number, held in enumerate(ranks):
        differ = [path for path in sorted(first | held) if first.get(path) != held.get(path)]
        if differ or [*first] != [*held]:
            path = differ[0] if differ else "the model"
            here, there = (each.get(path, "missing") for each in (first, held))
            wrong = (
                f"{here} on rank 0, and {there}" if differ else "its tensors are in another order"
            )
            yield Problem(path, f"{wrong} on rank {number}", _REMEDY)
            return
