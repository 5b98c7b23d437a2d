"""The rewrites of convolutions as products: kernel = stride, kernel = input, and one pixel."""

from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from prepare.steps.repairs.base import not_a_view
from prepare.steps.rewrites.base import Rewrite, Rewritten, as_matrix, multiply, plain_reason

# An image has at most this many channels: its weight is read as (O, C * k), that of others in their format.
_IMAGE_CHANNELS = 4


class Linear(Rewritten):
    """A convolution with kernel = stride: each output position reads pixels of its own, as a product does.

    Helps: patch embeddings, which oneDNN and cuDNN run in slow kernels; above all in training with a
    gradient of the input, which is another product.
    Hurts: the input is copied into rows, which small contiguous kernels (2x2) do not earn back.
    Sizes that do not divide run torch's own code.
    Source: y[n, o, p] = b[o] + sum over c, i of w[o, c, i] * x[n, c, p * k + i], for 0 <= i < k.
    """

    rewritten_as = "linear"

    @property
    def _reads_contiguous(self) -> bool:
        return self.in_channels <= _IMAGE_CHANNELS

    def _takes(self, x: Tensor) -> bool:
        return not any(
            size % step for size, step in zip(x.shape[2:], self.kernel_size, strict=True)
        )

    def _compute(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return multiply(self, x, weight, bias)


class LinearConv2d(Linear, nn.Conv2d):
    """torch's Conv2d with kernel = stride, as a product."""


class LinearConv3d(Linear, nn.Conv3d):
    """torch's Conv3d with kernel = stride, as a product."""


class _KernelIsStride(Rewrite):
    """Rewrite convolutions whose kernel is their stride, and larger than one pixel."""

    phrase = "a product"

    def mismatch(self, module: Any) -> str:
        if module.kernel_size != module.stride:
            return f"kernel {module.kernel_size} is not the stride {module.stride}"
        return plain_reason(module) or (
            "" if prod(module.kernel_size) > 1 else "kernel is one pixel"
        )


class OnePosition(Linear):
    """A convolution of patches that are cut already: the patch is a row, and nothing is copied.

    Helps: the vision towers of Qwen2-VL, Qwen3-VL and others, which cut patches before the convolution.
    Hurts: nothing that we measured; larger inputs run torch's own code.
    Source: y[n, o, 0] = b[o] + sum over c, i of w[o, c, i] * x[n, c, i].
    """

    rewritten_as = "one_position"

    def _takes(self, x: Tensor) -> bool:
        return tuple(x.shape[2:]) == tuple(self.kernel_size)


class OnePositionConv2d(OnePosition, nn.Conv2d):
    """torch's Conv2d on inputs as large as its kernel, as a product."""


class OnePositionConv3d(OnePosition, nn.Conv3d):
    """torch's Conv3d on inputs as large as its kernel, as a product."""


class Pointwise(Rewritten):
    """A 1x1 or 1x1x1 convolution with stride 1: input and result are views of the product's operands.

    Helps: wide 1x1 convolutions of few pixels, and 1x1x1 ones, where the convolution reorders its weight.
    Hurts: many narrow ones, where oneDNN's kernels are as fast and a call of ours takes some microseconds.
    Source: y[n, o, p] = b[o] + sum over c of w[o, c, 0] * x[n, c, p].
    """

    rewritten_as = "pointwise"

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


class _OnePosition(_KernelIsStride):
    never_loses = True


class _OnePixel(Rewrite):
    phrase = "a product"

    def mismatch(self, module: Any) -> str:
        if prod(module.kernel_size) > 1:
            return f"kernel {module.kernel_size} is not one pixel"
        if prod(module.stride) > 1:
            return f"stride {module.stride} is not 1"
        return plain_reason(module)


REWRITES = (
    _KernelIsStride("linear", LinearConv2d, LinearConv3d),
    _OnePosition("one_position", OnePositionConv2d, OnePositionConv3d),
    _OnePixel("pointwise", PointwiseConv2d, PointwiseConv3d),
)
