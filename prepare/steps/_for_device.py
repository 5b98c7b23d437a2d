"""Base of the steps that need to know the device that the pipeline moves the model to."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable
from typing import ClassVar, Self

from prepare.step import Step
from prepare.steps.device import Device


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForDevice(Step):
    """A step that acts by the device of the pipeline's step `device`."""

    # The device, set by `bind`; None if the pipeline has no such step. Not an option.
    _device: ClassVar[str | None] = None

    def bind(self, steps: Iterable[Step]) -> Self:
        steps = list(steps)
        bound = copy.copy(super().bind(steps))
        device = next((step.device for step in steps if isinstance(step, Device)), None)
        object.__setattr__(bound, "_device", device)
        return bound
