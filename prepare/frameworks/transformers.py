"""A callback of transformers' Trainer that prepares its model before the optimizer is made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prepare.core.utils.packages import naming_extra
from prepare.frameworks._recipe import NetworkRecipe, Recipe

with naming_extra("transformers"):
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

if TYPE_CHECKING:
    from torch import nn


class PrepareCallback(TrainerCallback):
    """Prepares the model of a Trainer when the Trainer is made.

    When training starts, after a checkpoint was loaded, the state of the optimizer gets the layout of its
    parameters, weights are checked, and the audit and the recipe are written into `output_dir`.

    Args:
        recipe: the path of a recipe, a mapping of steps, or a Pipeline. A step `device` is left out.

    Raises:
        DriftError: when training starts, something has lost the layout.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = NetworkRecipe(recipe)
        self._network: nn.Module | None = None

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Prepare the model."""
        network: nn.Module = kwargs["model"]
        self._network = network
        self._recipe.apply(network)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Hand over the optimizer, check the weights, and write the audit."""
        assert self._network is not None  # the Trainer calls on_init_end first
        optimizer = getattr(kwargs["optimizer"], "optimizer", kwargs["optimizer"])
        self._recipe.adopt(self._network, [optimizer])
        self._recipe.check(self._network, [optimizer])
        if state.is_world_process_zero and args.output_dir is not None:
            self._recipe.write(self._network, args.output_dir)
