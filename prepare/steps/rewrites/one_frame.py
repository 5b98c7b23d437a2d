"""The rewrite of causal 3-d convolutions on one frame: the 2-d convolution of the tap that meets data."""

from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from prepare.core.model.transforms import is_transformed
from prepare.steps.rewrites.base import Rewrite, Rewritten, in_format

_KEYS = torch._C._TorchDispatchModeKey
_TRACING = (_KEYS.FAKE, _KEYS.PROXY, _KEYS.FUNCTIONAL)


class OneFrameConv3d(Rewritten, nn.Conv3d):
    """torch's Conv3d, but a call whose frames are zeros but for one runs as the 2-d convolution of that one.

    The zeros are the convolution's own padding, or frames of the input that were padded before, as causal
    convolutions do (`F.pad`, then `super().forward`): these are read at the call, on a CPU. With earlier
    frames of a cache, in a trace and under transforms, torch's own code runs. If a gradient of the input is
    needed, frames of zeros must come from `F.pad`, which drops theirs.
    Helps: the decoders of video models (Wan, Qwen-Image) on one image, two thirds of whose taps meet zeros.
    Hurts: a call with earlier frames reads some of their pixels. A weight that is not finite gives no NaN
    where it meets a zero.
    """

    def _takes(self, x: Tensor) -> bool:
        padded = x.shape[2] + 2 * _time_padding(self)
        return self.kernel_size[0] <= padded < self.kernel_size[0] + self.stride[0]

    def _place(self, x: Tensor) -> int | None:
        """Return the only frame of `x` that has data and meets a tap; None if there are several."""
        met = min(x.shape[2], self.kernel_size[0] - _time_padding(self))
        if met == 1:
            return 0
        if met < 1 or not _can_be_read(x):
            return None
        for place in (met - 1, 0):
            if _are_zeros(x, met, place):
                return place
        return None

    def _compute(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        if (place := self._place(x)) is None:
            return None
        padding = self.padding if isinstance(self.padding, str) else self.padding[1:]
        frame, tap = x[:, :, place], weight[:, :, place + _time_padding(self)]
        y = F.conv2d(frame, tap, bias, self.stride[1:], padding, self.dilation[1:], self.groups)
        return in_format(y.unsqueeze(2), last=self._is_last(x, weight))


class _Causal(Rewrite):
    def mismatch(self, module: Any) -> str:
        if module.kernel_size[0] == 1:
            return f"kernel {module.kernel_size} has one tap in time"
        if module.padding == "same" or module.padding_mode != "zeros":
            return f"padding {module.padding} with {module.padding_mode} is not a number of zeros"
        # As a 2-d convolution torch's backward may write outside its memory: conv2d_strided_kernel_1_cpu.
        if prod(module.kernel_size[1:]) == 1 < prod(module.stride[1:]):
            return f"stride {module.stride} is not 1 where the kernel is one pixel"
        return "" if module.dilation[0] == 1 else f"dilation {module.dilation} is not 1 in time"


REWRITE = _Causal(
    "one_frame",
    {nn.Conv3d: OneFrameConv3d},
    identity="y[n, o, 0] = conv2d(x[n, :, t], w[:, :, t + padding]) if x[n, :, s] = 0 for every other s",
    phrase="a 2-d convolution of one frame",
)


def _time_padding(module: nn.Conv3d) -> int:
    return 0 if isinstance(module.padding, str) else module.padding[0]


def _can_be_read(x: Tensor) -> bool:
    """Return whether values of `x` may decide what runs: of a plain tensor on a CPU, outside of a trace."""
    return (
        type(x) in (Tensor, nn.Parameter)
        and x.device.type == "cpu"
        and not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()
        and not is_transformed()
        and torch.autograd.forward_ad._current_level < 0
        and all(torch._C._get_dispatch_mode(mode) is None for mode in _TRACING)
    )


def _are_zeros(x: Tensor, met: int, place: int) -> bool:
    """Return whether the first `met` frames of `x` but one are zeros, and nobody needs their gradient."""
    if torch.is_grad_enabled() and x.requires_grad and not _is_padding(x, place):
        return False
    others = x[:, :, place + 1 : met] if place < met - 1 else x[:, :, :place]
    # One pixel of each channel first: frames of a cache are found there.
    pixel = others[..., others.shape[3] // 2, others.shape[4] // 2]
    return not (pixel.any() or others.any())


def _is_padding(x: Tensor, place: int) -> bool:
    """Return whether all frames but one were made by `F.pad`, as the graph of `x` says."""
    made_by: Any = x.grad_fn
    if type(made_by).__name__ != "ConstantPadNdBackward0":
        return False
    pad = [*made_by._saved_pad, 0, 0, 0, 0, 0, 0]
    return place <= pad[4] and x.shape[2] - 1 - place <= pad[5]
