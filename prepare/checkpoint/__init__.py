"""Checkpoints: save the weights of a prepared model, and load weights straight into a prepared model."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prepare.checkpoint.load_checkpoint import Loaded, load
    from prepare.checkpoint.save_checkpoint import export, save

__all__ = ["Loaded", "export", "load", "save"]

# Imported when they are used: these modules load torch.
_MODULES = {
    "Loaded": "load_checkpoint",
    "export": "save_checkpoint",
    "load": "load_checkpoint",
    "save": "save_checkpoint",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
