"""Report where activations change layout in a forward pass, which operation does it, and what it costs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prepare.flow.records import Convolution, Copy, Event, Flow, ModuleLayout

if TYPE_CHECKING:
    from prepare.flow.follow import observe, predict

__all__ = ["Convolution", "Copy", "Event", "Flow", "ModuleLayout", "observe", "predict"]


def __getattr__(name: str) -> Any:
    if name in ("observe", "predict"):  # they import torch
        from prepare.flow import follow

        return getattr(follow, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
