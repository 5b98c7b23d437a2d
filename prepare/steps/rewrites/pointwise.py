"""The rewrite of convolutions of one pixel with stride 1: a product over the channels."""

from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from prepare.steps.repairs.base import not_a_view
from prepare.steps.rewrites.base import Rewrite, Rewritten, as_matrix, plain_reason


class Pointwise(Rewritten):
    """A 1x1 or 1x1x1 convolution with stride 1: input and result are views of the product's operands.

    Helps: wide 1x1 convolutions of few pixels, and 1x1x1 ones, where the convolution reorders its weight.
    Hurts: many narrow ones, where oneDNN's kernels are as fast and a call of ours takes some microseconds.
    """

    def _compute(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        matrix, sizes = as_matrix(weight), x.shape[2:]
        if self._is_last(x, weight):
            return not_a_view(F.linear(x.movedim(1, -1), matrix, bias).movedim(-1, 1))
        columns = x.flatten(2)
        if len(x) == 1:
            columns = columns[0]
            result = (
                matrix @ columns if bias is None else torch.addmm(bias[:, None], matrix, columns)
            )
        else:
            matrix = matrix.expand(len(x), -1, -1)
            result = (
                torch.bmm(matrix, columns)
                if bias is None
                else torch.baddbmm(bias[:, None], matrix, columns)
            )
        return not_a_view(result.view(len(x), -1, *sizes))


class PointwiseConv2d(Pointwise, nn.Conv2d):
    """torch's Conv2d of one pixel, as a product."""


class PointwiseConv3d(Pointwise, nn.Conv3d):
    """torch's Conv3d of one pixel, as a product."""


class _OnePixel(Rewrite):
    def mismatch(self, module: Any) -> str:
        if prod(module.kernel_size) > 1:
            return f"kernel {module.kernel_size} is not one pixel"
        if prod(module.stride) > 1:
            return f"stride {module.stride} is not 1"
        return plain_reason(module)


REWRITE = _OnePixel(
    "pointwise",
    {nn.Conv2d: PointwiseConv2d, nn.Conv3d: PointwiseConv3d},
    identity="y[n, o, p] = b[o] + sum over c of w[o, c, 0] * x[n, c, p]",
    phrase="a product",
)
