"""Read, set and restore the settings of torch and of the process, autocast among them."""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast, get_args

import numpy as np
import torch

from prepare.core.utils.process_state import PROCESS_STATE
from prepare.core.utils.suggest import choose, meant
from prepare.errors import RefusedError

if TYPE_CHECKING:
    from torch import nn

# A value that torch refuses to read: its older and newer switches were set to different things.
MIXED = "mixed"


class _Setting(NamedTuple):
    get: Callable[[], Any]
    set: Callable[[Any], object]

    def read(self) -> Any:
        try:
            return self.get()
        except RuntimeError:
            return MIXED


def saved_switches() -> Callable[[], None]:
    """Return a function that sets every switch to its present value."""
    # The fields come last: setting a precision of matrix products, or TF32, sets several of them.
    return _saved((*SWITCHES.values(), *_fields()))


@contextmanager
def isolated() -> Iterator[None]:
    """Restore torch's global settings, random states, the current folder and sys.path afterwards.

    One thread at a time is in such a block. Inside it the current folder is on sys.path, so that the user's
    packages can be imported.
    """
    with PROCESS_STATE:
        path, folder = list(sys.path), os.getcwd()  # noqa: PTH109
        restore_settings, restore_switches = _saved(_SETTINGS), saved_switches()
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
            restore_settings()
            restore_switches()


def _saved(settings: Iterable[_Setting]) -> Callable[[], None]:
    values = [(setting, setting.read()) for setting in settings]

    def restore() -> None:
        for setting, value in values:
            now = setting.read()
            same = torch.equal(now, value) if isinstance(value, torch.Tensor) else now == value
            # Some settings reach into other threads, even if the value is the same.
            if value is not MIXED and not same:
                setting.set(value)

    return restore


def _attribute(owner: Any, name: str) -> _Setting:
    return _Setting(lambda: getattr(owner, name), lambda value: setattr(owner, name, value))


def _fields() -> list[_Setting]:
    """Return the field of each operation; torch has them from version 2.9 on."""
    torch_backends: Any = torch.backends
    backends = (torch_backends.cudnn, torch_backends.mkldnn)
    names = ("conv", "rnn", "matmul")
    owners = [getattr(backend, name, None) for backend in backends for name in names]
    owners.insert(0, torch_backends.cuda.matmul)
    return [
        _attribute(each, "fp32_precision") for each in owners if hasattr(each, "fp32_precision")
    ]


def _device_states() -> torch.Tensor | None:
    return torch.stack(torch.cuda.get_rng_state_all()) if torch.cuda.is_initialized() else None


def _set_device_states(states: torch.Tensor | None) -> None:
    if states is not None:
        torch.cuda.set_rng_state_all(states)


# By name, for the step that sets them.
SWITCHES = {
    "cudnn_benchmark": _attribute(torch.backends.cudnn, "benchmark"),
    "cudnn_deterministic": _attribute(torch.backends.cudnn, "deterministic"),
    "matmul_precision": _Setting(
        torch.get_float32_matmul_precision, torch.set_float32_matmul_precision
    ),
    # Not the field of each operation: torch then refuses to read the older switch, which others do.
    "cudnn_tf32": _attribute(torch.backends.cudnn, "allow_tf32"),
}
_SETTINGS = (
    _Setting(torch.get_default_dtype, torch.set_default_dtype),
    _Setting(torch.is_grad_enabled, torch.set_grad_enabled),
    _Setting(torch.get_num_threads, torch.set_num_threads),
    _Setting(torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    _attribute(torch.backends.cudnn, "enabled"),
    _Setting(torch.get_rng_state, torch.set_rng_state),
    _Setting(_device_states, _set_device_states),
    _Setting(random.getstate, random.setstate),
    _Setting(
        lambda: pickle.dumps(np.random.get_state()),  # noqa: NPY002
        lambda state: np.random.set_state(pickle.loads(state)),  # noqa: NPY002, S301
    ),
)


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
    return next((each.device for each in chain(own, tensors)), torch.device("cpu"))
