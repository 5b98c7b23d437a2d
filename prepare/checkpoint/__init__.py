"""Checkpoints: save the weights of a prepared model, and load weights straight into a prepared model."""

from typing import TYPE_CHECKING

from prepare.core.utils.lazy_names import lazy_names

if TYPE_CHECKING:
    from prepare.checkpoint.load_checkpoint import Loaded, load
    from prepare.checkpoint.save_checkpoint import export, save

__all__ = ["Loaded", "export", "load", "save"]

__getattr__ = lazy_names(
    __name__,
    load_checkpoint=("Loaded", "load"),
    save_checkpoint=("export", "save"),
)
