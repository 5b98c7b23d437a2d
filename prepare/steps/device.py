"""Move every parameter and buffer to one device; the base of the steps that act by that device."""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Iterable
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, ClassVar, Self

from prepare.core.utils.options import as_written
from prepare.core.utils.suggest import choose, meant
from prepare.errors import Problem
from prepare.registry import register
from prepare.step import ForRecipes, Step, TensorStep, Want

if TYPE_CHECKING:
    import torch

    from prepare.core.model.tensors import NamedTensor

DEVICE = "a device, as in cpu or cuda:0"
_KINDS = ("auto", "cpu", "cuda", "mps", "xpu", "meta")


def readable_device(device: str) -> str:
    """Return the name of a device, such as `cuda:0` for `gpu:0`.

    Raises:
        ValueError: it is not the name of a device; with the allowed names.
    """
    kind, colon, index = device.partition(":")
    device = f"{meant(kind, _KINDS) or kind}{colon}{index}"
    if not re.fullmatch(rf"({'|'.join(_KINDS)})(:[0-9]{{1,4}})?", device) or device.startswith(
        "auto:"
    ):
        raise ValueError(f"{as_written(device)} is not a device", choose(device, _KINDS))
    return device


@register("device")
class Device(TensorStep):
    """Moves every parameter and buffer to one device.

    Helps: required to run on an accelerator; together with the other tensor steps, each tensor is
    allocated there once, in its final dtype and layout.
    Hurts: nothing; a model that is already there is not changed.
    Source: `torch.nn.Module.to(device)`.
    """

    device: Annotated[str, DEVICE, readable_device, ForRecipes()] = "auto"
    """`auto` is the first of cuda, mps and cpu that this machine has."""

    def settle(self) -> Self:
        """Return this step with the device that `auto` is on this machine, as recipes store it."""
        import torch

        if self.device == "cpu:0":
            # A tensor that is moved there says `cpu`.
            return dataclasses.replace(self, device="cpu")
        if self.device != "auto":
            return self
        if torch.cuda.is_available():
            return dataclasses.replace(self, device="cuda")
        device = "mps" if torch.backends.mps.is_available() else "cpu"
        return dataclasses.replace(self, device=device)

    def want(self, tensor: NamedTensor) -> Want:
        return self._want

    @cached_property
    def _want(self) -> Want:
        return Want(device=self.device)

    def obstacles(self, model: torch.nn.Module) -> Iterable[Problem]:
        kind, _, index = self.device.partition(":")
        where = f"steps.{self.name}.device"
        if kind == "meta":
            remedy = "build the model there with torch.device('meta') instead"
            yield Problem(where, "meta holds no data", remedy)
        elif int(index or 0) >= _count(kind):
            available = ", ".join(kind for kind in _KINDS[1:-1] if _count(kind))
            wrong = f"{self.device} is not available here"
            yield Problem(where, wrong, f"available: {available}")


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

    def device_of(self, model: torch.nn.Module) -> str:
        """Return the type of the device on which the model will be: cpu, cuda."""
        tensors = (tensor for each in (model.parameters(), model.buffers()) for tensor in each)
        present = next((tensor.device.type for tensor in tensors), "cpu")
        return (self._device or present).partition(":")[0]


def _count(kind: str) -> int:
    """Return the number of devices of this kind that this machine has."""
    import torch

    if kind == "cpu":
        return 1
    if kind == "mps":
        return int(torch.backends.mps.is_available())
    backend = getattr(torch, kind)
    return backend.device_count() if backend.is_available() else 0
