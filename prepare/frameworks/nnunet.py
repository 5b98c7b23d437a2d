"""A trainer of nnU-Net v2 that prepares its network as it is built, in training and in prediction."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer

from prepare.errors import ConfigError
from prepare.frameworks.outside import Recipe, network_pipeline

if TYPE_CHECKING:
    from torch import nn


def _with_signature_of(original: Callable) -> Callable[[Callable], Callable]:
    """Give a class method the signature of `original`: nnU-Net reads from it which arguments to give."""
    signature = inspect.signature(original)
    cls = inspect.Parameter("cls", inspect.Parameter.POSITIONAL_ONLY)

    def decorate(function: Callable) -> Callable:
        parameters = [cls, *signature.parameters.values()]
        vars(function)["__signature__"] = signature.replace(parameters=parameters)
        return function

    return decorate


class PrepareTrainer(nnUNetTrainer):
    """nnU-Net's trainer with a recipe: `recipe` of a subclass, or the path in `PREPARE_RECIPE`.

    nnU-Net finds a trainer by the name of its class in the files of the folder `nnUNet_extTrainer`. The
    network is prepared before it is moved, compiled, wrapped or given an optimizer.

    Raises:
        ConfigError: there is no recipe.
    """

    recipe: ClassVar[Recipe | None] = None

    @classmethod
    @_with_signature_of(nnUNetTrainer.build_network_architecture)
    def build_network_architecture(cls, *args: Any, **kwargs: Any) -> nn.Module:
        """Build the network as nnU-Net does, and prepare it."""
        recipe = cls.recipe if cls.recipe is not None else os.environ.get("PREPARE_RECIPE")
        if recipe is None:
            remedy = "set PREPARE_RECIPE=recipe.yaml, or recipe in a subclass"
            raise ConfigError("recipe", "PrepareTrainer has none", remedy)
        return network_pipeline(recipe).apply(super().build_network_architecture(*args, **kwargs))
