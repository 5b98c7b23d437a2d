"""Format the user's batch for the prepared model, and vary it: size, mean, small random changes."""

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


def user_call(call: Call, prepared: nn.Module, pipeline: Pipeline | None) -> Call:
    """Return the call that a user makes: formatted, unless the prepared model formats its inputs itself."""
    formats_itself = pipeline is not None and user_formatter(pipeline) is None
    return call if formats_itself else format_call(call, prepared, pipeline)


def format_call(call: Call, prepared: nn.Module, pipeline: Pipeline | None) -> Call:
    """Convert the call to the device, dtypes and memory formats of the prepared model."""
    if pipeline is None:
        return call.map(_formatter_like(prepared).tensor)
    formatter = user_formatter(pipeline) or pipeline.format
    # A step written by a user expects the batch itself, not a tuple of arguments.
    args = (formatter(call.args[0]),) if len(call.args) == 1 else formatter(call.args)
    return Call(args, formatter(call.kwargs))


def user_formatter(pipeline: Pipeline) -> Callable[[Any], Any] | None:
    """Return the function with which a user formats a batch; None if the model formats it itself.

    Without an input step, only the device and the floating-point dtype are converted, since the model
    could not run otherwise.
    """
    steps = pipeline.steps.values()
    if not any(step.phase == "inputs" for step in steps):
        return replace(InputFormat().bind(steps), memory_format=None).format
    return None if any(getattr(step, "attach", False) for step in steps) else pipeline.format


def resized(call: Call, size: int) -> Call:
    """Return the call with `size` samples: the first ones, or repetitions with small random changes."""
    batch = call.batch
    if batch is None or batch == size:
        return call

    def resize(tensor: Tensor) -> Tensor:
        if not tensor.dim() or len(tensor) != batch:
            return tensor
        repeats = -(-size // batch)
        parts = [tensor, *(jittered_tensor(tensor, 0.1, seed) for seed in range(1, repeats))]
        return torch.cat([part.contiguous() for part in parts])[:size].contiguous()

    return call.map(resize)


def shifted(call: Call, deviations: float) -> Call:
    """Return the call with each floating-point tensor shifted by a number of its standard deviations."""

    def shift(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point() or tensor.numel() < 2:
            return tensor
        return tensor + deviations * tensor.double().std().to(tensor.dtype)

    return call.map(shift) if deviations else call


def jittered(call: Call, fraction: float, seed: int) -> Call:
    """Add random numbers to each floating-point tensor, scaled to a fraction of its standard deviation."""
    return call.map(lambda tensor: jittered_tensor(tensor, fraction, seed))


def nudged(call: Call, seed: int = 0) -> Call:
    """Return the call with each floating-point number changed by about one unit in the last place."""
    return call.map(lambda tensor: nudged_tensor(tensor, seed))


def nudged_tensor(tensor: Tensor, seed: int = 0) -> Tensor:
    """Change each floating-point number of a tensor by about one unit in the last place."""
    if not tensor.is_floating_point():
        return tensor
    eps = torch.finfo(tensor.dtype).eps
    return tensor + tensor * eps * _signs(tensor, seed)


def jittered_tensor(tensor: Tensor, fraction: float, seed: int) -> Tensor:
    """Add random numbers to a floating-point tensor, scaled to a fraction of its standard deviation."""
    if not tensor.is_floating_point() or tensor.numel() < 2:
        return tensor
    noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed))
    scale = fraction * float(tensor.double().std())
    return tensor + (noise * scale).to(tensor.device, tensor.dtype)


def _signs(tensor: Tensor, seed: int) -> Tensor:
    bits = torch.randint(0, 2, tensor.shape, generator=torch.Generator().manual_seed(seed))
    return (bits * 2 - 1).to(tensor.device, tensor.dtype)


def _formatter_like(model: nn.Module) -> Formatter:
    """Return a formatter for the device and dtype of most of the model's parameters."""
    counts: dict[tuple[torch.device, torch.dtype], int] = {}
    for tensor in model.parameters():
        if tensor.is_floating_point():
            kind = (tensor.device, tensor.dtype)
            counts[kind] = counts.get(kind, 0) + tensor.numel()
    return Formatter(*max(counts, key=lambda kind: counts[kind])) if counts else Formatter()
