"""Read and set the switches of torch's backends: cuDNN, TF32, float32 matrix products, MIOpen."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

_NHWC = "PYTORCH_MIOPEN_SUGGEST_NHWC"
# A value that torch refuses to read: its older and newer switches were set to different things.
MIXED = "mixed"


class _Switch(NamedTuple):
    get: Callable[[], Any]
    set: Callable[[Any], None]

    def read(self) -> Any:
        try:
            return self.get()
        except RuntimeError:
            return MIXED


def read_switch(name: str) -> Any:
    """Return the present value of a switch."""
    return _SWITCHES[name].read()


def set_switch(name: str, value: Any) -> None:
    """Set a switch."""
    _SWITCHES[name].set(value)


def saved_switches() -> Callable[[], None]:
    """Return a function that sets every switch to its present value."""
    # The fields come last: setting a precision of matrix products, or TF32, sets several of them.
    values = [(switch, switch.read()) for switch in (*_SWITCHES.values(), *_fields())]

    def restore() -> None:
        for switch, value in values:
            if value != MIXED and switch.read() != value:
                switch.set(value)

    return restore


def _attribute(owner: Any, name: str) -> _Switch:
    return _Switch(lambda: getattr(owner, name), lambda value: setattr(owner, name, value))


def _nhwc() -> bool | None:
    value = os.environ.get(_NHWC)
    return None if value is None else value not in ("", "0")


def _set_nhwc(value: bool | None) -> None:  # noqa: FBT001
    if value is None:
        os.environ.pop(_NHWC, None)
    else:
        os.environ[_NHWC] = str(int(value))


def _fields() -> list[_Switch]:
    """Return the field of each operation; torch has them from version 2.9 on."""
    torch_backends: Any = torch.backends
    if not hasattr(torch_backends.cuda.matmul, "fp32_precision"):
        return []
    owners = [torch_backends.cuda.matmul]
    for backend in (torch_backends.cudnn, torch_backends.mkldnn):
        owners += [
            getattr(backend, name) for name in ("conv", "rnn", "matmul") if hasattr(backend, name)
        ]
    return [_attribute(owner, "fp32_precision") for owner in owners]


_SWITCHES = {
    "cudnn_benchmark": _attribute(torch.backends.cudnn, "benchmark"),
    "cudnn_deterministic": _attribute(torch.backends.cudnn, "deterministic"),
    "matmul_precision": _Switch(
        torch.get_float32_matmul_precision, torch.set_float32_matmul_precision
    ),
    # Not the field of each operation: torch then refuses to read the older switch, which others do.
    "cudnn_tf32": _attribute(torch.backends.cudnn, "allow_tf32"),
    "miopen_nhwc": _Switch(_nhwc, _set_nhwc),
}
