"""Format inputs to match the prepared model: device, floating-point dtype, strides by rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from prepare.registry import register
from prepare.step import ForRecipes, InputStep, Step, TensorStep
from prepare.steps.device import DEVICE, readable_device

if TYPE_CHECKING:
    import torch

    from prepare.core.forward.input_formatter import Formatter

# The memory format of each choice by number of dimensions; 0 stands for any number.
_BY_RANK: dict[str | None, tuple[tuple[int, str], ...]] = {
    "contiguous": ((0, "contiguous"),),
    "channels_last": ((4, "channels_last"),),
    "channels_last_3d": ((5, "channels_last_3d"),),
    "by_rank": ((4, "channels_last"), (5, "channels_last_3d")),
}


@register("input_format")
class InputFormat(InputStep):
    """Formats a batch: any nesting of dicts, lists, tuples, NamedTuples and dataclasses of tensors.

    Casts floating-point tensors, never integers or booleans. 4-d tensors become channels_last and 5-d
    ones channels_last_3d, with canonical strides, even if `is_contiguous` already returns True. Images of
    shape (N, H, W, C), with at most 4 channels and more pixels, keep their strides: permuted, they lie in
    channels-last. A finite value beyond the range of a 16-bit dtype becomes its largest number. A value
    that needs no change is returned as the same object.
    With `attach`, forward gets a formatted copy of its arguments: what it writes into a copy does not reach
    the caller, and a warning says so; then format the batch by hand. A compiled call leaves strides to its
    compiler, and does not warn.
    Helps: required for 16-bit weights; for channels-last weights it saves the first copy.
    Hurts: with `attach`, a call that bypasses `model(...)` (`model.forward`, a submodule) is not
    formatted.
    Source: pytorch issues 68430 and 113437, on strides that only look channels-last.
    """

    device: Annotated[str, DEVICE, readable_device, ForRecipes()] | None = None
    """null follows the pipeline's `device` step."""
    dtype: Literal["float16", "bfloat16", "float32", "float64"] | None = None
    """null follows the pipeline's `half` step."""
    memory_format: Literal["contiguous", "channels_last", "channels_last_3d", "by_rank"] | None = (
        None
    )
    """null follows the formats that the pipeline requests."""
    attach: bool = False
    """Installs the formatting on the model, so that callers change nothing."""

    def bind(self, steps: Iterable[Step]) -> Self:
        tensor_steps = [step for step in steps if isinstance(step, TensorStep)]
        formats: set[Any] = {name for step in tensor_steps for name in step.formats().values()}
        if {"channels_last", "channels_last_3d"} <= formats:
            followed: Any = "by_rank"
        else:
            followed = min(formats, default=None)
        return dataclasses.replace(
            self,
            device=self.device or _first(tensor_steps, "device"),
            dtype=self.dtype or _first(tensor_steps, "dtype"),
            memory_format=self.memory_format or followed,
        )

    def format(self, batch: Any) -> Any:
        return self._formatter(batch)

    def targets(self, model: torch.nn.Module) -> Iterable[str]:
        from prepare.core.forward.input_formatter import FormatHook

        return ("",) if self.attach and not FormatHook(self._formatter).is_on(model) else ()

    def act(self, model: torch.nn.Module) -> None:
        from prepare.core.forward.input_formatter import FormatHook

        FormatHook(self._formatter).install(model)

    @classmethod
    def undo(cls, model: torch.nn.Module) -> None:
        """Remove the formatting that `attach` has installed on `model`, in place."""
        from prepare.core.forward.input_formatter import FormatHook

        FormatHook.remove(model)

    @cached_property
    def _formatter(self) -> Formatter:
        import torch

        from prepare.core.forward.input_formatter import Formatter

        return Formatter(
            torch.device(self.device) if self.device else None,
            getattr(torch, self.dtype) if self.dtype else None,
            _BY_RANK.get(self.memory_format, ()),
        )


undo = InputFormat.undo


def _first(steps: list[TensorStep], option: str) -> Any:
    return next((value for step in steps if (value := getattr(step, option, None))), None)
