"""Format the user's batch for the prepared model, and vary it by small random changes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from prepare.core.forward.call import Call, map_named, placed
from prepare.core.forward.input_formatter import Formatter, may_be_activation
from prepare.stages.verify.deviations import rounding_step

if TYPE_CHECKING:
    from prepare.pipeline import Pipeline

# A tensor that exceeds its tolerance is compared again on inputs changed by this fraction.
JITTER = 0.02
# A prime, so that no two rows of a tensor get the same numbers.
_PERIOD = 10007


def user_call(call: Call, prepared: nn.Module, pipeline: Pipeline | None) -> Call:
    """Return the call that a user makes: formatted, unless the prepared model formats its inputs itself."""
    is_formatted = pipeline is None or user_formatter(pipeline) is not None
    return format_call(call, prepared, pipeline) if is_formatted else call


def format_call(call: Call, prepared: nn.Module, pipeline: Pipeline | None) -> Call:
    """Convert the call to the device, dtypes and memory formats of the prepared model.

    Without a pipeline, these are the device and dtype of its largest parameter.
    """
    if pipeline is not None:
        return pipeline.format_call(call, prepared)
    floats = [p for p in prepared.parameters() if p.is_floating_point()]
    largest = max(floats, key=Tensor.numel, default=None)
    return call if largest is None else call.map(Formatter(largest.device, largest.dtype).tensor)


def rounded_call(call: Call, prepared: nn.Module, pipeline: Pipeline | None) -> Call:
    """Return the formatted call, but what is no activation as the user gave it: to round that is an error."""
    formatted = format_call(call, prepared, pipeline)
    own = dict(placed((call.args, call.kwargs)))

    def choose(tensor: Tensor, place: str) -> Tensor:
        mine = own[place]
        is_same = may_be_activation(mine) or mine.dtype == tensor.dtype
        return tensor if is_same else mine.to(tensor.device)

    return Call(*map_named(choose, (formatted.args, formatted.kwargs)))


def user_formatter(pipeline: Pipeline) -> Callable[[Any], Any] | None:
    """Return the function with which a user formats a batch; None if the model formats it itself."""
    is_attached = any(getattr(step, "attach", False) for step in pipeline.steps.values())
    return None if is_attached else pipeline.format


def nudged(tensor: Tensor) -> Tensor:
    """Change each floating-point number of a tensor by what a module may round, up or down."""
    if not tensor.is_floating_point():
        return tensor
    return tensor + tensor * rounding_step(tensor.dtype) * _noise(tensor).sign()


def jittered(tensor: Tensor) -> Tensor:
    """Add random numbers to a floating-point tensor, scaled to its root mean square."""
    if not tensor.is_floating_point() or tensor.numel() < 2:
        return tensor
    size = torch.linalg.vector_norm(tensor.detach(), dtype=torch.float64)
    return tensor + _noise(tensor) * (JITTER * float(size) / math.sqrt(tensor.numel()))


def _noise(like: Tensor) -> Tensor:
    """Return random numbers with a variance of 1; they repeat, since each costs as much as a product."""
    count, generator = like.numel(), torch.Generator("cpu").manual_seed(0)
    drawn = torch.randn(min(count, _PERIOD), generator=generator, device="cpu")
    drawn = drawn.repeat(-(-count // max(len(drawn), 1)))[:count]
    return drawn.view(like.shape).to(like.device, like.dtype)
