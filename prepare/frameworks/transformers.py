"""A callback of transformers' Trainer that prepares its model before the optimizer is made."""

from __future__ import annotations

from typing import Any

from prepare.core.utils.packages import naming_extra
from prepare.frameworks.outside import Outside, Recipe

with naming_extra("transformers"):
    from transformers import TrainerCallback


class PrepareCallback(TrainerCallback):
    """Prepares the model of a Trainer, and each that `model_init` makes, before it is wrapped or called.

    The state of the optimizer follows, also from a checkpoint.

    Args:
        recipe: the path of a recipe, a mapping of steps, or a Pipeline. A step `device` is left out.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._outside = Outside(recipe)

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Prepare the model, and begin to look for others of its class."""
        self._outside.module = type(kwargs["model"]).__name__
        self._outside.start().prepare(kwargs["model"])

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin again where a search for hyperparameters trains once more."""
        if self._outside not in Outside.active:
            self._outside.start()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End to look for models."""
        self._outside.stop()
