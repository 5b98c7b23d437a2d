"""The rewrites of 3-d convolutions as 2-d ones: flat in time or space, and of one frame."""

from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from prepare.core.model.module_kinds import is_transformed
from prepare.steps.repairs.base import is_channels_last
from prepare.steps.rewrites.base import Rewrite, Rewritten, in_format


class LowerRankConv3d(Rewritten, nn.Conv3d):
    """torch's Conv3d with a kernel of (1, h, w) or (t, 1, 1), as a 2-d convolution.

    For (1, h, w) frames are samples; for (t, 1, 1) the two dimensions are time and all pixels.
    Helps: 3-d kernels that are slower than 2-d ones, as torch's reference kernel at batch 1 on a CPU.
    Hurts: for (1, h, w) a contiguous input of several frames is copied; in channels-last nothing is.
    Source: y[n, :, t] = conv2d(x[n, :, t], w[:, :, 0]), or y[..., p] = conv1d(x[..., p], w[..., 0, 0]).
    """

    rewritten_as = "lower_rank"

    def _compute(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        last, padding, dilation = self._is_last(x, weight), self.padding, self.dilation
        if self.kernel_size[0] > 1:
            column = padding if isinstance(padding, str) else (padding[0], 0)
            y = F.conv2d(
                _columns(x),
                _columns(weight),
                bias,
                (self.stride[0], 1),
                column,
                (dilation[0], 1),
                self.groups,
            )
            if is_channels_last(y):
                y = y.movedim(1, -1).unflatten(2, x.shape[3:]).movedim(-1, 1)
            else:
                y = y.unflatten(3, x.shape[3:])
            return in_format(y, last=last)
        frame = padding if isinstance(padding, str) else padding[1:]
        y = F.conv2d(
            x.squeeze(2) if x.shape[2] == 1 else x.transpose(1, 2).flatten(0, 1),
            weight.squeeze(2),
            bias,
            self.stride[1:],
            frame,
            dilation[1:],
            self.groups,
        )
        return in_format(y.unflatten(0, (len(x), x.shape[2])).transpose(1, 2), last=last)


def _columns(x: Tensor) -> Tensor:
    """Return all pixels of `x` as one dimension: a view with the strides of its layout.

    `flatten` alone gives one sample in channels-last another stride, with which torch's grouped convolution
    computes wrong gradients of its weight.
    """
    return x.movedim(1, -1).flatten(2, 3).movedim(-1, 1) if is_channels_last(x) else x.flatten(3)


class _Flat(Rewrite):
    phrase = "a 2-d convolution"

    def mismatch(self, module: Any) -> str:
        time, *space = module.kernel_size
        if prod(module.kernel_size) == 1 or (time > 1 and prod(space) > 1):
            return f"kernel {module.kernel_size} is neither (1, h, w) nor (t, 1, 1)"
        flat = slice(1, 3) if time > 1 else slice(1)
        if prod(module.stride[flat]) > 1:
            return f"stride {module.stride} is not 1 where the kernel is flat"
        if not isinstance(module.padding, str) and any(module.padding[flat]):
            return f"padding {module.padding} is not 0 where the kernel is flat"
        mode = module.padding_mode
        return "" if mode == "zeros" else f"padding_mode {mode} is not zeros"


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
    Source: y[n, o, 0] = conv2d(x[n, :, t], w[:, :, t + padding]) if x[n, :, s] = 0 for every other s.
    """

    rewritten_as = "one_frame"

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
    phrase = "a 2-d convolution of one frame"

    def mismatch(self, module: Any) -> str:
        if module.kernel_size[0] == 1:
            return f"kernel {module.kernel_size} has one tap in time"
        if module.padding == "same" or module.padding_mode != "zeros":
            return f"padding {module.padding} with {module.padding_mode} is not a number of zeros"
        # As a 2-d convolution torch's backward may write outside its memory: conv2d_strided_kernel_1_cpu.
        if prod(module.kernel_size[1:]) == 1 < prod(module.stride[1:]):
            return f"stride {module.stride} is not 1 where the kernel is one pixel"
        return "" if module.dilation[0] == 1 else f"dilation {module.dilation} is not 1 in time"


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


REWRITES = (_Flat("lower_rank", LowerRankConv3d), _Causal("one_frame", OneFrameConv3d))
