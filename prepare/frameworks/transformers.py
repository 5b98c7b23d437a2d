"""A callback of transformers' Trainer that prepares its model before the optimizer is made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prepare.core.utils.packages import naming_extra
from prepare.frameworks.outside import Outside, Recipe

with naming_extra("transformers"):
    from transformers import TrainerCallback

if TYPE_CHECKING:
    from pathlib import Path


class PrepareCallback(TrainerCallback):
    """Prepares the model of a Trainer when the Trainer is made, and each that `model_init` makes.

    When training starts, after a checkpoint was loaded, weights and optimizer states are checked.

    Args:
        recipe: the path of a recipe, a mapping of steps, or a Pipeline. A step `device` is left out.
        folder: where the audit and the recipe are written; nowhere by default.

    Raises:
        DriftError: when training starts, something has lost the layout.
    """

    def __init__(self, recipe: Recipe, *, folder: str | Path | None = None) -> None:
        self._outside, self._folder = Outside(recipe), folder

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Prepare the model, and begin to look for others of its class."""
        model = kwargs["model"]
        self._outside.module = type(model).__name__
        self._outside.start()
        self._outside.prepare(model, strict=True)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Check weights and the optimizer, and write the audit."""
        optimizer = getattr(kwargs["optimizer"], "optimizer", kwargs["optimizer"])
        self._outside.before_step(optimizer)
        self._outside.check()
        if self._folder is not None and state.is_world_process_zero:
            self._outside.write(self._folder)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End to look for models."""
        self._outside.stop()
