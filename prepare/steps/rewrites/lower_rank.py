"""The rewrite of 3-d convolutions that are flat in time or in space: as a 2-d convolution."""

from math import prod
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from prepare.steps.repairs.base import is_channels_last
from prepare.steps.rewrites.base import Rewrite, Rewritten, in_format


class LowerRankConv3d(Rewritten, nn.Conv3d):
    """torch's Conv3d with a kernel of (1, h, w) or (t, 1, 1), as a 2-d convolution.

    For (1, h, w) frames are samples; for (t, 1, 1) the two dimensions are time and all pixels.
    Helps: 3-d kernels that are slower than 2-d ones, as torch's reference kernel at batch 1 on a CPU.
    Hurts: for (1, h, w) a contiguous input of several frames is copied; in channels-last nothing is.
    """

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


REWRITE = _Flat(
    "lower_rank",
    {nn.Conv3d: LowerRankConv3d},
    identity="y[n, :, t] = conv2d(x[n, :, t], w[:, :, 0]), or y[..., p] = conv1d(x[..., p], w[..., 0, 0])",
    phrase="a 2-d convolution",
)
