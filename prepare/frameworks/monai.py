"""A handler for MONAI's trainers, or any engine of Ignite, that prepares the network when a run starts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prepare.core.utils.packages import naming_extra
from prepare.errors import RefusedError
from prepare.frameworks.outside import Outside, Recipe

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
        network: the network; by default those of the engine, as MONAI's trainers have them.
        optimizer: its optimizer; by default those of the engine, if it has any.
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
        self._outside, self._folder = Outside(recipe), folder
        self._network, self._optimizer = network, optimizer

    def attach(self, engine: Engine) -> None:
        """Register the handler with an engine."""
        engine.add_event_handler(Events.STARTED, self._start)
        engine.add_event_handler(Events.EPOCH_STARTED, lambda _: self._outside.check())

    def _start(self, engine: Engine) -> None:
        # MONAI's trainers have them only after their handlers; a GanTrainer has two of each.
        found = {part: _of(engine, part) for part in ("network", "optimizer")}
        networks = [self._network] if self._network is not None else found["network"]
        if not networks:
            wrong = f"{type(engine).__name__} has no network"
            raise RefusedError("network", wrong, "give network=")
        optimizers = [self._optimizer] if self._optimizer is not None else found["optimizer"]
        self._outside.optimizers.update(optimizers)
        for network in networks:
            self._outside.prepare(network, strict=True)
        if self._folder is not None:
            self._outside.write(self._folder)


def _of(engine: Engine, part: str) -> list[Any]:
    found = [getattr(engine, prefix + part, None) for prefix in ("", "g_", "d_")]
    return [each for each in found if each is not None]
