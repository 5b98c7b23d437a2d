"""Format inputs to match the prepared model: device, floating-point dtype, strides by rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from prepare.patterns import Patterns
from prepare.registry import register
from prepare.step import ForRecipes, InputStep, Step, TensorStep
from prepare.steps.device import DEVICE, readable_device

if TYPE_CHECKING:
    import torch

    from prepare.core.forward.input_formatter import FormatHook, Formatter

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

    Casts tensors of two dimensions or more in float32 or 16 bits; no scalars, vectors, float64, integers or
    booleans. `include` names arguments that are cast too, `exclude` those that are not: `timestep`,
    `targets.*`. With an example, as in a run, `exclude` names what no convolution or linear layer needs.
    A tensor with a finite value beyond the range of the new dtype stays as it is, with a warning; the mask
    values `finfo.min` and `finfo.max` become those of the new dtype. 4-d tensors become channels_last and 5-d
    ones channels_last_3d, with canonical strides, even if `is_contiguous` already returns True. Images of
    shape (N, H, W, C), with at most 4 channels and more pixels, keep their strides: permuted, they lie in
    channels-last. A value that needs no change is returned as the same object.
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
    include: Patterns = ()
    """Arguments that are cast whatever they are."""
    exclude: Patterns | None = None
    """Arguments that keep their dtype; null: those that an example shows, if there is one."""

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

    def format_call(self, model: torch.nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the arguments of a call, formatted by the names that they have in `model`."""
        return self._formatter((args, kwargs), self._hook(model).name_of)

    def targets(self, model: torch.nn.Module) -> Iterable[str]:
        from prepare.core.model.module_tree import called_modules

        called = [*called_modules(model).values()] if self.attach else []
        new = [m for m in called if self._hook(m) not in m._forward_pre_hooks.values()]
        return [name for name, module in model.named_modules() if module in new]

    def act(self, model: torch.nn.Module) -> None:
        from prepare.core.model.module_tree import called_modules

        for module in called_modules(model).values():
            self._hook(module).install(module)

    def without_example(self) -> str:
        asks = self.dtype in ("float16", "bfloat16") and self.exclude is None
        return "exclude: each argument of two dimensions or more is cast" if asks else ""

    def for_example(
        self, model: torch.nn.Module, example: Any, *, backward: bool, amp: Any
    ) -> tuple[Self, list[str]]:
        import torch

        from prepare.core.forward.input_formatter import needless

        if any(each.is_meta for each in model.parameters()):
            return self, []
        found = needless(model, example.args, example.kwargs, getattr(torch, str(self.dtype)))
        notes = [f"steps.{self.name}: no layer needs {', '.join(found)} in {self.dtype}"]
        return dataclasses.replace(self, exclude=tuple(found)), notes if found else []

    @classmethod
    def undo(cls, model: torch.nn.Module) -> None:
        """Remove the formatting that `attach` has installed on `model`, in place."""
        from prepare.core.forward.input_formatter import FormatHook
        from prepare.core.model.module_tree import called_modules

        for module in called_modules(model).values():
            FormatHook.remove(module)

    def _hook(self, model: torch.nn.Module) -> FormatHook:
        from prepare.core.forward.input_formatter import FormatHook

        return FormatHook.of(model, self._formatter)

    @cached_property
    def _formatter(self) -> Formatter:
        import torch

        from prepare.core.forward.input_formatter import Formatter

        return Formatter(
            torch.device(self.device) if self.device else None,
            getattr(torch, self.dtype) if self.dtype else None,
            _BY_RANK.get(self.memory_format, ()),
            tuple(self.include),
            tuple(self.exclude or ()),
        )


undo = InputFormat.undo


def _first(steps: list[TensorStep], option: str) -> Any:
    return next((value for step in steps if (value := getattr(step, option, None))), None)
