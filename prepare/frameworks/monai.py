"""A handler for MONAI's trainers, or any engine of Ignite, that prepares the network when a run starts."""

from __future__ import annotations

from prepare.core.utils.packages import naming_extra
from prepare.frameworks.outside import Outside

with naming_extra("ignite"):
    from ignite.engine import Engine, Events


class PrepareHandler(Outside):
    """Prepares each network that an engine calls at its first call, with its optimizer.

    It may be attached before or after a handler that loads a checkpoint.

    Args:
        recipe: the path of a recipe, a mapping of steps, or a Pipeline. A step `device` is left out.
        module: the network, or a pattern of class names; by default each that is called, as the two of a
            GanTrainer.
    """

    def attach(self, engine: Engine) -> None:
        """Register the handler with an engine."""
        engine.add_event_handler(Events.STARTED, lambda _: self.start())
        for end in (Events.COMPLETED, Events.TERMINATE, Events.EXCEPTION_RAISED):
            engine.add_event_handler(end, self._end)

    def _end(self, engine: Engine, error: BaseException | None = None) -> None:
        self.stop()
        if error is not None:
            raise error
