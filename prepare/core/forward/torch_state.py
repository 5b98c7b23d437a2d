"""Restore the settings of the process after a job, so that the next job of a sweep is not affected."""

import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from prepare.core.forward.backends import saved_switches
from prepare.core.utils.process_state import PROCESS_STATE


@contextmanager
def isolated() -> Iterator[None]:
    """Restore torch's global settings, random states, the current folder and sys.path afterwards.

    One thread at a time is in such a block. Inside it the current folder is on sys.path, so that the user's
    packages can be imported.
    """
    with PROCESS_STATE:
        path, folder = list(sys.path), os.getcwd()  # noqa: PTH109
        settings = [(read, restore, read()) for read, restore in _SETTINGS]
        restore_switches = saved_switches()
        device = torch.get_default_device()
        if folder not in sys.path:
            sys.path.insert(0, folder)
        try:
            yield
        finally:
            sys.path[:] = path
            os.chdir(folder)
            # Setting it, even to the same device, slows every later call of a factory function.
            if torch.get_default_device() != device:
                torch.set_default_device(None if device.type == "cpu" else device)
            for read, restore, value in settings:
                # Some settings reach into other threads, even if the value is the same.
                if not _equal(read(), value):
                    restore(value)
            restore_switches()


def _equal(now: Any, before: Any) -> bool:
    if isinstance(before, list):  # of random states
        return now is not None and all(map(_equal, now, before))
    return torch.equal(now, before) if isinstance(before, torch.Tensor) else now == before


def _set_deterministic(value: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(value[0], warn_only=value[1])


def _cudnn_enabled() -> bool:
    return torch.backends.cudnn.enabled


def _enable_cudnn(value: bool) -> None:  # noqa: FBT001
    torch.backends.cudnn.enabled = value


def _deterministic() -> tuple[bool, bool]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )


def _device_states() -> list[torch.Tensor] | None:
    return torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None


def _set_device_states(states: list[torch.Tensor] | None) -> None:
    if states is not None:
        torch.cuda.set_rng_state_all(states)


# Pairs of functions: read a setting, restore it.
_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.get_num_threads, torch.set_num_threads),
    (_deterministic, _set_deterministic),
    (_cudnn_enabled, _enable_cudnn),
    (torch.get_rng_state, torch.set_rng_state),
    (_device_states, _set_device_states),
    (random.getstate, random.setstate),
)
