"""Run a forward under torch.autocast, or without it, in a context that caches no cast of a weight."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

import torch

from prepare.core.utils.suggest import choose, meant
from prepare.errors import RefusedError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn

Amp = Literal["none", "bfloat16", "float16"]


def read_amp(amp: object) -> Amp:
    """Return the word for `amp`, such as `bfloat16` for `bf16` or torch's object.

    Raises:
        RefusedError: it is not one of none, bfloat16 and float16.
    """
    if (known := meant(amp, get_args(Amp))) is None:
        raise RefusedError("amp", f"{amp!r} is not allowed", choose(str(amp), get_args(Amp)))
    return cast("Amp", known)


def autocast(amp: str, device: torch.device) -> AbstractContextManager[Any]:
    """Return a context for a forward on `device`; with `none`, an autocast region around it has no effect.

    torch keeps the casts of weights until the outermost region ends, so a weight whose data was exchanged
    would still be used with its old values. Here each cast is made anew. That costs nothing unless a
    forward uses a weight twice.

    Raises:
        RefusedError: torch has no autocast for this device.
    """
    kind = device.type
    if amp == "none":
        if kind == "meta" or not torch.is_autocast_enabled(kind):
            return contextlib.nullcontext()
        return torch.autocast(kind, enabled=False)
    if not torch.amp.is_autocast_available(kind):
        wrong = f"torch has no autocast for {kind}"
        raise RefusedError("amp", wrong, "choose amp=none, or another device")
    return torch.autocast(kind, getattr(torch, amp), cache_enabled=False)


def device_of(models: Iterable[nn.Module], tensors: Iterable[torch.Tensor] = ()) -> torch.device:
    """Return the device of the first parameter or buffer of `models`, else of the first of `tensors`."""
    own = (t for model in models for each in (model.parameters(), model.buffers()) for t in each)
    first = next(own, None)
    if first is None:
        first = next(iter(tensors), None)
    return torch.device("cpu") if first is None else first.device
