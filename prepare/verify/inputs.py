"""What a model is called with: the user's batch as arguments, and variations of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from prepare.core.forward.call import Call
from prepare.core.forward.input_formatter import Formatter
from prepare.steps.input_format import InputFormat

if TYPE_CHECKING:
    from prepare.pipeline import Pipeline


def as_used(call: Call, prepared: nn.Module, pipeline: Pipeline | None) -> Call:
    """The call as a user gives it to the prepared model: as it is, where that formats it itself."""
    itself = pipeline is not None and formatting(pipeline) is None
    return call if itself else formatted(call, prepared, pipeline)


def formatted(call: Call, prepared: nn.Module, pipeline: Pipeline | None) -> Call:
    """The call in the device, types and formats that the prepared model runs in."""
    if pipeline is None:
        return call.map(_like(prepared).tensor)
    form = formatting(pipeline) or pipeline.format
    # A step of a user's own expects the batch itself.
    args = (form(call.args[0]),) if len(call.args) == 1 else form(call.args)
    return Call(args, form(call.kwargs))


def formatting(pipeline: Pipeline) -> Callable[[Any], Any] | None:
    """How a user formats a batch for what `pipeline` prepared; None where the model does so itself.

    Without an input step batches come as they are: only what the model could not run without,
    the device and the floating-point type, is brought into line.
    """
    steps = pipeline.steps.values()
    if not any(step.phase == "inputs" for step in steps):
        return replace(InputFormat().bind(steps), memory_format=None).format
    return None if any(getattr(step, "attach", False) for step in steps) else pipeline.format


def of_size(call: Call, size: int) -> Call:
    """The call with `size` samples: the first ones, or the same repeated, a little different each time."""
    batch = call.batch

    def resize(tensor: Tensor) -> Tensor:
        if not tensor.dim() or len(tensor) != batch:
            return tensor
        repeats = -(-size // batch)
        parts = [tensor, *(_jittered(tensor, 0.1, seed) for seed in range(1, repeats))]
        return torch.cat([part.contiguous() for part in parts])[:size].contiguous()

    return call if batch in (None, size) else call.map(resize)


def shifted(call: Call, deviations: float) -> Call:
    """The call with the mean of each floating tensor moved by so many of its standard deviations."""

    def shift(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point() or tensor.numel() < 2:
            return tensor
        return tensor + deviations * tensor.double().std().to(tensor.dtype)

    return call.map(shift) if deviations else call


def jittered(call: Call, part: float, seed: int) -> Call:
    """The call with random numbers of this part of its own deviation added to each floating tensor."""
    return call.map(lambda tensor: _jittered(tensor, part, seed))


def nudged(call: Call, seed: int = 0) -> Call:
    """The call with every floating number moved by about one unit of its last place."""

    def nudge(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        eps = torch.finfo(tensor.dtype).eps
        return tensor + tensor * eps * _signs(tensor, seed)

    return call.map(nudge)


def _jittered(tensor: Tensor, part: float, seed: int) -> Tensor:
    if not tensor.is_floating_point() or tensor.numel() < 2:
        return tensor
    noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed))
    scale = part * float(tensor.double().std())
    return tensor + (noise * scale).to(tensor.device, tensor.dtype)


def _signs(tensor: Tensor, seed: int) -> Tensor:
    drawn = torch.randint(0, 2, tensor.shape, generator=torch.Generator().manual_seed(seed))
    return (drawn * 2 - 1).to(tensor.device, tensor.dtype)


def _like(model: nn.Module) -> Formatter:
    sizes: dict[tuple[torch.device, torch.dtype], int] = {}
    for tensor in model.parameters():
        if tensor.is_floating_point():
            kind = (tensor.device, tensor.dtype)
            sizes[kind] = sizes.get(kind, 0) + tensor.numel()
    return Formatter(*max(sizes, key=lambda kind: sizes[kind])) if sizes else Formatter()
