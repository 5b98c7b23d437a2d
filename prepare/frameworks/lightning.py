"""A Lightning callback that prepares the network of a module before its optimizers are made."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from prepare.core.utils.packages import naming_extra
from prepare.frameworks._recipe import NetworkRecipe, Recipe, child_network

with naming_extra("lightning"):
    import lightning.pytorch as pl

if TYPE_CHECKING:
    from torch import nn


class Prepare(pl.Callback):
    """Prepares the network in `setup`, which runs before optimizers are made and the strategy wraps it.

    Inputs are formatted by a hook of the network. At the start of a fit the optimizers are handed over, and
    the audit and the recipe are written into the folder of the logger, on rank 0. At the start of training,
    when checkpoints have been loaded, weights and optimizer states are checked.

    Args:
        recipe: the path of a recipe, a mapping of steps, or a Pipeline. A step `device` is left out.
        module: the name of the network in the LightningModule; by default its only child with parameters.

    Raises:
        DriftError: when training starts, something has lost the layout.
        RefusedError: `module` is not a module, or several are possible.
    """

    def __init__(
        self,
        recipe: Recipe,
        *,
        module: str | None = None,
    ) -> None:
        self._recipe, self._name = NetworkRecipe(recipe), module

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Prepare the network."""
        self._recipe.apply(self._network(pl_module))

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Hand over the optimizers, before their state is restored, and write the audit."""
        network = self._network(pl_module)
        self._recipe.adopt(network, trainer.optimizers)
        # `log_dir` is a broadcast, which every rank has to join.
        if (folder := trainer.log_dir) is not None and trainer.is_global_zero:
            self._recipe.write(network, Path(folder))

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Check weights and optimizer states after checkpoints were loaded."""
        self._recipe.check(self._network(pl_module), trainer.optimizers)

    def _network(self, module: pl.LightningModule) -> nn.Module:
        return child_network(module, self._name)
