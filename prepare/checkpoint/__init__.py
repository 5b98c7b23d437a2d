"""Checkpoints: save the weights of a prepared model, and load weights straight into a prepared model."""

from typing import TYPE_CHECKING

from prepare.core.utils.packages import lazy_names

if TYPE_CHECKING:
    from prepare.checkpoint.weights import Loaded, load, save

__all__ = ["Loaded", "load", "save"]

__getattr__ = lazy_names(__name__, weights=("Loaded", "load", "save"))
