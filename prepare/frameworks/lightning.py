"""A Lightning callback that prepares the networks of a module before its optimizers are made."""

from __future__ import annotations

from typing import Any

from prepare.core.utils.packages import naming_extra
from prepare.core.utils.suggest import choose
from prepare.errors import RefusedError
from prepare.frameworks.outside import Outside

with naming_extra("lightning"):
    import lightning.pytorch as pl


class Prepare(Outside, pl.Callback):
    """Prepares each network of a LightningModule at its first call, or before the strategy wraps it.

    So a network that `configure_model` builds is prepared too. Its inputs are formatted by a hook.
    The state of optimizers follows, also from a checkpoint.

    Args:
        recipe: the path of a recipe, a mapping of steps, or a Pipeline. A step `device` is left out.
        module: the name of the network in the LightningModule; by default each that is called.

    Raises:
        RefusedError: `module` is not a module.
    """

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Begin to look for networks, before optimizers are made."""
        self._of = pl_module
        if self.module != "*" and not hasattr(pl_module, str(self.module).partition(".")[0]):
            remedy = choose(str(self.module), dict(pl_module.named_children()), noun="modules")
            raise RefusedError("module", f"{self.module!r} is not a module", remedy)
        self.start()

    def wants(self, network: Any) -> bool:
        """Return whether the network has the name; `configure_model` may build it later."""
        return self.module == "*" or dict(self._of.named_modules()).get(self.module) is network

    def teardown(self, *_: Any, **__: Any) -> None:
        """End to look for networks."""
        self.stop()

    on_exception = teardown
