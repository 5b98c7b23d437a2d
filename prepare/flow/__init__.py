"""Report where activations change layout in a forward pass, which operation does it, and what it costs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from prepare.flow.records import Convolution, Copy, Event, Flow, ModuleLayout

if TYPE_CHECKING:
    from torch import nn

    from prepare.core.forward.autocast import Amp

__all__ = ["Convolution", "Copy", "Event", "Flow", "ModuleLayout", "observe", "predict"]


def predict(
    model: nn.Module,
    example: Any,
    *,
    backward: bool = False,
    wanted: Mapping[int, str] | None = None,
    amp: Amp = "none",
) -> Flow:
    """Predict the flow of one forward from shapes and strides, without computing any value.

    Args:
        model: in training or evaluation mode; it is not changed.
        example: a tensor, a tuple of positional or a mapping of named arguments, or an Example.
        backward: also follow the gradients of the sum of all outputs.
        wanted: `{4: "channels_last", 5: "channels_last_3d"}`; by default the layouts of the model's
            convolution weights, see `prepare.flow.target_layouts`.
        amp: run the forward under `torch.autocast` to this dtype; casts of autocast keep the layout.

    If forward needs a value, or an operation cannot run without data, the flow has the status
    `cannot predict`, the reason, and the events up to that point. torch's shape functions are wrong for a
    few operations (in backward ReLU6); for these only `observe` is right.
    The result holds for the current number of threads: with a single one, torch 2.13 runs 1x1x1
    convolutions of float32 on its reference path, which returns a contiguous tensor.

    Raises:
        ConfigError: `wanted` does not name a layout.
        RefusedError: `amp` is unknown.
    """
    from prepare.flow import follow

    return follow.predict(model, example, backward=backward, wanted=wanted, amp=amp)


def observe(
    model: nn.Module,
    example: Any,
    *,
    backward: bool = False,
    wanted: Mapping[int, str] | None = None,
    amp: Amp = "none",
) -> Flow:
    """Observe the flow of one real forward; the arguments are those of `predict`.

    Gradients are enabled only with `backward`. The model runs on the values of its own parameters, and on
    copies of its buffers and of the example. Random states, gradients, attributes, hooks and training mode
    are restored afterwards.

    Raises:
        ConfigError: `wanted` does not name a layout.
        RefusedError: `amp` is unknown, or a lazy module has no parameters yet.
        ModelError: the forward or backward raised; names the innermost module.
    """
    from prepare.flow import follow

    return follow.observe(model, example, backward=backward, wanted=wanted, amp=amp)
