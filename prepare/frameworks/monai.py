"""A handler for MONAI's trainers, or any engine of Ignite, that prepares the network when a run starts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prepare.core.utils.packages import naming_extra
from prepare.errors import RefusedError
from prepare.frameworks._recipe import NetworkRecipe, Recipe

with naming_extra("ignite"):
    from ignite.engine import Engine, Events

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn
    from torch.optim import Optimizer


class PrepareHandler:
    """Prepares the network, with its optimizer, when an engine starts, and checks both at each epoch.

    Attach it after a handler that loads a checkpoint, since handlers run in the order in which they are
    attached; a network in DistributedDataParallel must be prepared before it is wrapped.

    Args:
        recipe: the path of a recipe, a mapping of steps, or a Pipeline. A step `device` is left out.
        network: the network; by default the attribute `network` of the engine, as MONAI's trainers have it.
        optimizer: its optimizer; by default the attribute `optimizer` of the engine, if it has one.
        folder: where the audit and the recipe are written; nowhere by default.

    Raises:
        DriftError: at the start of an epoch, something has lost the layout.
        RefusedError: when the engine starts, it has no network.
    """

    def __init__(
        self,
        recipe: Recipe,
        *,
        network: nn.Module | None = None,
        optimizer: Optimizer | None = None,
        folder: str | Path | None = None,
    ) -> None:
        self._recipe, self._folder = NetworkRecipe(recipe), folder
        self._network, self._optimizer = network, optimizer

    def attach(self, engine: Engine) -> None:
        """Register the handler with an engine."""
        engine.add_event_handler(Events.STARTED, self._start)
        engine.add_event_handler(Events.EPOCH_STARTED, self._check)

    def _start(self, engine: Engine) -> None:
        network = self._of(engine, "network")  # MONAI's trainers have it only after their handlers
        if network is None:
            wrong = f"{type(engine).__name__} has no network"
            raise RefusedError("network", wrong, "give network=")
        self._recipe.apply(network, self._optimizers(engine))
        if self._folder is not None:
            self._recipe.write(network, self._folder)

    def _check(self, engine: Engine) -> None:
        self._recipe.check(self._of(engine, "network"), self._optimizers(engine))

    def _optimizers(self, engine: Engine) -> list[Optimizer]:
        optimizer = self._of(engine, "optimizer")
        return [] if optimizer is None else [optimizer]

    def _of(self, engine: Engine, name: str) -> Any:
        own = getattr(self, f"_{name}")
        return getattr(engine, name, None) if own is None else own
