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
    from torch import nn


class Prepare(pl.Callback):
    """Prepares each network of a LightningModule at its first call, or before the strategy wraps it.

    So a network that `configure_model` builds is prepared too. Its inputs are formatted by a hook.
    The state of optimizers follows, also from a checkpoint.

    Args:
        recipe: the path of a recipe, a mapping of steps, or a Pipeline. A step `device` is left out.
        module: the name of the network in the LightningModule; by default each child with Parameters.

    Raises:
        RefusedError: `module` is not a module.
    """

    def __init__(self, recipe: Recipe, *, module: str | None = None) -> None:
        self._name, self._module = module, pl.LightningModule()
        self._outside = Outside(recipe, only=self._networks)

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Begin to look for networks, before optimizers are made."""
        self._module = pl_module
        self._networks()
        self._outside.start()

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """End to look for networks."""
        self._outside.stop()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """End to look for networks."""
        self._outside.stop()

    def _networks(self) -> list[nn.Module]:
        children = dict(self._module.named_children())
        if self._name is None:
            return [each for each in children.values() if any(True for _ in each.parameters())]
        try:
            return [self._module.get_submodule(self._name)]
        except AttributeError:
            # `configure_model` builds it later.
            if hasattr(self._module, self._name.partition(".")[0]):
                return []
            remedy = choose(self._name, children, noun="modules")
            raise RefusedError("module", f"{self._name!r} is not a module", remedy) from None
