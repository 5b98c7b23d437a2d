"""A Lightning callback that prepares the networks of a module before its optimizers are made."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prepare.core.utils.packages import naming_extra
from prepare.core.utils.suggest import choose
from prepare.errors import RefusedError
from prepare.frameworks.outside import Outside, Recipe

with naming_extra("lightning"):
    import lightning.pytorch as pl

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn


class Prepare(pl.Callback):
    """Prepares networks in `setup`, before optimizers are made and the strategy wraps the module.

    A network that `configure_model` builds is prepared once it exists. Inputs are formatted by a hook of each
    network. The state of optimizers follows, also from a checkpoint.

    Args:
        recipe: the path of a recipe, a mapping of steps, or a Pipeline. A step `device` is left out.
        module: the name of the network in the LightningModule; by default each child with Parameters.
        folder: where the audit and the recipe are written, on rank 0; nowhere by default.

    Raises:
        DriftError: when training starts, something has lost the layout.
        RefusedError: `module` is not a module.
    """

    def __init__(
        self, recipe: Recipe, *, module: str | None = None, folder: str | Path | None = None
    ) -> None:
        self._recipe, self._name, self._folder = recipe, module, folder

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Prepare the networks that there are, and begin to look for others."""
        self._outside = Outside(self._recipe, only=lambda: _networks(pl_module, self._name)).start()
        for network in _networks(pl_module, self._name):
            self._outside.prepare(network, strict=self._name is not None)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Check weights and optimizer states after checkpoints were loaded."""
        self._outside.check()
        if self._folder is not None and trainer.is_global_zero:
            self._outside.write(self._folder)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """End to look for networks."""
        self._outside.stop()


def _networks(module: nn.Module, name: str | None) -> list[nn.Module]:
    children = {
        key: each for key, each in module.named_children() if any(True for _ in each.parameters())
    }
    if name is None:
        return list(children.values())
    try:
        found = module.get_submodule(name)
    except AttributeError:
        if hasattr(module, name.partition(".")[0]):  # configure_model builds it later
            return []
        remedy = choose(name, children, noun="modules with parameters")
        raise RefusedError("module", f"{name!r} is not a module", remedy) from None
    return [found]
