"""Recognise calls whose backward on a CPU ends the process, or writes outside its memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format
from torch.nn import functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode

from prepare.core.model.known_issues import CHANNEL_BLOCK


def is_unsafe_group_norm(
    input: Tensor,  # noqa: A002  torch's name
    num_groups: int,  # noqa: ARG001
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *_: Any,
    **__: Any,
) -> bool:
    """Return whether the backward of a group norm reads a gradient of `input` that does not exist."""
    trained = any(each is not None and each.requires_grad for each in (weight, bias))
    return (
        trained
        and not torch.compiler.is_compiling()
        and not input.requires_grad
        and torch.is_grad_enabled()
        and input.device.type == "cpu"
        and _takes_channels_last(input)
    )


def is_unsafe_conv2d(  # noqa: PLR0917  as torch's conv2d
    input: Tensor,  # noqa: A002  torch's name
    weight: Tensor,
    bias: Tensor | None = None,  # noqa: ARG001
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,  # noqa: ARG001
    groups: int = 1,
) -> bool:
    """Return whether oneDNN writes outside its buffer in the backward of a strided 1x1 convolution.

    Its copy of every `stride`-th pixel takes a block of channels where there are fewer (oneDNN#6035).
    """
    steps = (stride, stride) if isinstance(stride, int) else tuple(stride) * (2 // len(stride))
    return (
        weight.dim() == input.dim() == 4
        and tuple(weight.shape[2:]) == (1, 1)
        and any(step > 1 for step in steps)
        and all(size % step == 0 for size, step in zip(input.shape[2:], steps, strict=True))
        and padding in (0, "valid", (0,), [0], (0, 0), [0, 0])
        and groups == 1
        and weight.shape[1] < CHANNEL_BLOCK
        and input.device.type == "cpu"
        and input.dtype == weight.dtype == torch.float32
        and weight.requires_grad
        and torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
        and (_takes_channels_last(input) or _takes_channels_last(weight))
    )


class UnsafeCalls(TorchFunctionMode):
    """While entered, raises RuntimeError for a call whose backward is not safe, with the known issue."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        is_unsafe, issue = _UNSAFE.get(func, (None, ""))
        if is_unsafe is not None and is_unsafe(*args, **kwargs):
            raise RuntimeError(f"torch may end the process in its backward [{issue}]")
        return func(*args, **kwargs)


_UNSAFE: dict[Any, tuple[Any, str]] = {
    F.group_norm: (is_unsafe_group_norm, "group_norm_frozen_input_cpu"),
    torch.group_norm: (is_unsafe_group_norm, "group_norm_frozen_input_cpu"),
    torch.conv2d: (is_unsafe_conv2d, "conv2d_strided_kernel_1_cpu"),
}


def _takes_channels_last(x: Tensor) -> bool:
    """Return whether torch's kernels take these strides for channels-last ones."""
    return suggest_memory_format(x) in (torch.channels_last, torch.channels_last_3d)
