"""A trainer of nnU-Net v2 that prepares its network as it is built, in training and in prediction."""

from __future__ import annotations

import inspect
import os
from typing import Any, ClassVar

from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer

from prepare.errors import ConfigError
from prepare.frameworks.outside import Recipe, network_pipeline


class PrepareTrainer(nnUNetTrainer):
    """nnU-Net's trainer with a recipe: `recipe` of a subclass, or the path in `PREPARE_RECIPE`.

    nnU-Net finds a trainer by the name of its class in the files of the folder `nnUNet_extTrainer`. The
    network is prepared before it is moved, compiled, wrapped or given an optimizer.

    Raises:
        ConfigError: there is no recipe.
    """

    recipe: ClassVar[Recipe | None] = None

    @classmethod
    def build_network_architecture(cls, *args: Any, **kwargs: Any) -> Any:
        """Build the network as nnU-Net does, and prepare it."""
        recipe = cls.recipe if cls.recipe is not None else os.environ.get("PREPARE_RECIPE")
        if recipe is None:
            remedy = "set PREPARE_RECIPE=recipe.yaml, or recipe in a subclass"
            raise ConfigError("recipe", "PrepareTrainer has none", remedy)
        return network_pipeline(recipe).apply(super().build_network_architecture(*args, **kwargs))


# nnU-Net reads from the signature which arguments to give; that of a class method begins with the class.
_theirs = inspect.signature(nnUNetTrainer.build_network_architecture)
_cls = inspect.Parameter("cls", inspect.Parameter.POSITIONAL_ONLY)
vars(PrepareTrainer)["build_network_architecture"].__func__.__signature__ = _theirs.replace(
    parameters=[_cls, *_theirs.parameters.values()]
)
