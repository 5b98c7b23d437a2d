"""Formats inputs to match the prepared model: device, floating-point type, strides by rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from prepare.registry import register
from prepare.step import InputStep, Step
from prepare.steps.device import DEVICE, readable_device

if TYPE_CHECKING:
    import torch

    from prepare.core.forward.input_formatter import Formatter

# What each choice asks of tensors, by their number of dimensions; 0 stands for every number.
_BY_RANK = {
    "contiguous": ((0, "contiguous"),),
    "channels_last": ((4, "channels_last"),),
    "channels_last_3d": ((5, "channels_last_3d"),),
    "by_rank": ((4, "channels_last"), (5, "channels_last_3d")),
}


@register("input_format")
class InputFormat(InputStep):
    """Formats a batch: any nesting of dicts, lists, tuples, NamedTuples and dataclasses of tensors.

    Floating-point tensors are cast, integers and booleans never; 4-d tensors go to channels_last
    and 5-d ones to channels_last_3d, with canonical strides even where `is_contiguous` says yes
    already. What needs nothing comes back as the same object.
    Helps: with 16-bit weights it is needed; with channels-last weights it saves the first copy.
    Hurts: with `attach`, a call that bypasses `model(...)` (`model.forward`, a submodule) is not
    formatted.
    Source: pytorch issues 68430 and 113437, on strides that only look channels-last.
    """

    device: Annotated[str, DEVICE, readable_device] | None = None
    """null follows the pipeline's `device` step."""
    dtype: Literal["float16", "bfloat16", "float32", "float64"] | None = None
    """null follows the pipeline's `half` step."""
    memory_format: Literal["contiguous", "channels_last", "channels_last_3d", "by_rank"] | None = (
        None
    )
    """null follows the formats that the pipeline asks for."""
    attach: bool = False
    """Installs the formatting on the model, so that callers change nothing."""

    def bind(self, steps: Iterable[Step]) -> Self:
        asked = [step for step in steps if step.phase == "tensors"]
        formats = {getattr(step, "memory_format", None) for step in asked} - {None}
        if {"channels_last", "channels_last_3d"} <= formats:
            memory_format = "by_rank"
        else:
            memory_format = next(iter(sorted(formats)), None)
        return dataclasses.replace(
            self,
            device=self.device or _first(asked, "device"),
            dtype=self.dtype or _first(asked, "dtype"),
            memory_format=self.memory_format or memory_format,
        )

    def format(self, batch: Any) -> Any:
        return self._formatter(batch)

    def targets(self, model: torch.nn.Module) -> Iterable[str]:
        from prepare.core.forward.input_formatter import FormatHook

        return ("",) if self.attach and not FormatHook(self._formatter).is_on(model) else ()

    def act(self, model: torch.nn.Module) -> None:
        from prepare.core.forward.input_formatter import FormatHook

        FormatHook(self._formatter).install(model)

    @cached_property
    def _formatter(self) -> Formatter:
        import torch

        from prepare.core.forward.input_formatter import Formatter

        return Formatter(
            torch.device(self.device) if self.device else None,
            getattr(torch, self.dtype) if self.dtype else None,
            _BY_RANK.get(self.memory_format, ()),
        )


def _first(steps: list[Step], option: str) -> str | None:
    return next((value for step in steps if (value := getattr(step, option, None))), None)
