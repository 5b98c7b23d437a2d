"""A callback of transformers' Trainer that prepares its model before the optimizer is made."""

from __future__ import annotations

from typing import Any

from prepare.core.utils.packages import naming_extra
from prepare.frameworks.outside import Outside

with naming_extra("transformers"):
    from transformers import TrainerCallback


class PrepareCallback(Outside, TrainerCallback):
    """Prepares the model of a Trainer, and each that `model_init` makes, before it is wrapped or called.

    The state of the optimizer follows, also from a checkpoint.

    Args:
        recipe: the path of a recipe, a mapping of steps, or a Pipeline. A step `device` is left out.
    """

    def on_init_end(self, *_: Any, **__: Any) -> None:
        """Begin to look for models."""
        self.start()

    # A search for hyperparameters trains more than once.
    on_train_begin = on_init_end

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """End to look for models."""
        self.stop()
