"""Prepare models before Accelerate wraps them."""

from __future__ import annotations

from typing import Any

from torch import nn

from prepare.frameworks.outside import Outside, Recipe
from prepare.pipeline.distributed import same_on_all_ranks


def prepare(accelerator: Any, *objects: Any, recipe: Recipe) -> Any:
    """Apply a recipe to each model among `objects`, then return `accelerator.prepare(*objects)`.

    The state of their optimizers follows, inputs are formatted by a hook of the model, and all ranks are
    checked to hold the same model. A step `device` of the recipe is left out.

    Args:
        accelerator: an `accelerate.Accelerator`.
        objects: what `accelerator.prepare` takes.
        recipe: the path of a recipe, a mapping of steps, or a Pipeline.
    """
    for model in objects:
        if isinstance(model, nn.Module):
            Outside(recipe).prepare(model)
            same_on_all_ranks(model)
    return accelerator.prepare(*objects)
