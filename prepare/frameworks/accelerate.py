"""Prepare a model before Accelerate wraps it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from prepare.errors import RefusedError
from prepare.frameworks.outside import Outside, Recipe
from prepare.pipeline.distributed import same_on_all_ranks

if TYPE_CHECKING:
    from accelerate import Accelerator


def prepare(accelerator: Accelerator, *objects: Any, recipe: Recipe) -> Any:
    """Apply a recipe to the model among `objects`, then return `accelerator.prepare(*objects)`.

    The optimizers among them are handed over, inputs are formatted by a hook of the model, and all ranks are
    checked to hold the same model. A step `device` of the recipe is left out.

    Args:
        accelerator: an `accelerate.Accelerator`.
        objects: what `accelerator.prepare` takes, with one model.
        recipe: the path of a recipe, a mapping of steps, or a Pipeline.

    Raises:
        RefusedError: the objects hold no model, or several.
    """
    models = [each for each in objects if isinstance(each, nn.Module)]
    if len(models) != 1:
        wrong = f"{len(models)} of {len(objects)} are models"
        raise RefusedError("objects", wrong, "give one model, and apply a Pipeline to any other")
    optimizers = [each for each in objects if isinstance(each, Optimizer)]
    Outside(recipe, only=lambda: models, optimizers=optimizers).prepare(models[0])
    same_on_all_ranks(models[0])
    return accelerator.prepare(*objects)
