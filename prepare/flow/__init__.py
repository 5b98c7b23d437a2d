"""Where activations change layout in a forward pass, who does it, and what it costs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from prepare.flow.records import Convolution, Copy, Event, Flow, ModuleLayout

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Convolution", "Copy", "Event", "Flow", "ModuleLayout", "observe", "predict"]


def predict(
    model: nn.Module,
    example: Any,
    *,
    backward: bool = False,
    wanted: Mapping[int, str] | None = None,
) -> Flow:
    """The flow of one forward, without computing it: on tensors that have shapes and strides only.

    Args:
        model: it stays as it is, in training mode or not.
        example: a tensor, a tuple of positional or a mapping of named arguments, or an Example.
        backward: follow the gradients of the sum of all outputs as well.
        wanted: `{4: "channels_last", 5: "channels_last_3d"}`; by default as the model's
            convolutions lie, see `prepare.flow.target_layouts`.

    Where forward needs a value, or an operation cannot run without data, the flow has the status
    `cannot predict`, the reason, and what was seen up to there. torch's own shape functions are wrong
    about a few operations (ReplicationPad3d; in backward also ReLU6): there only `observe` is right.
    Both hold for this number of threads: with a single one, torch 2.13 runs 1x1x1 convolutions of
    float32 on its reference path, which gives a contiguous tensor.

    Raises:
        ConfigError: `wanted` names no layout.
    """
    from prepare.flow.follow import predict

    return predict(model, example, backward=backward, wanted=wanted)


def observe(
    model: nn.Module,
    example: Any,
    *,
    backward: bool = False,
    wanted: Mapping[int, str] | None = None,
) -> Flow:
    """The flow of one real forward, in the grad mode of `backward`; the arguments are those of `predict`.

    The model runs on its own parameters' values, on copies of its buffers and of the example. Random
    states, gradients, attributes, hooks and training mode are afterwards as before.

    Raises:
        ConfigError: `wanted` names no layout.
        RefusedError: a lazy module has no parameters yet.
        ModelError: the forward or backward raised; names the innermost module.
    """
    from prepare.flow.follow import observe

    return observe(model, example, backward=backward, wanted=wanted)
