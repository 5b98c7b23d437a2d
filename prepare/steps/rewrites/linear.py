"""The rewrite of convolutions whose kernel is their stride: patch embeddings run as one product."""

from math import prod
from typing import Any

from torch import Tensor, nn

from prepare.steps.rewrites.base import Rewrite, Rewritten, multiply, plain_reason

# An image has at most this many channels: its weight is read as (O, C * k), that of others in their format.
_IMAGE_CHANNELS = 4


class Linear(Rewritten):
    """A convolution with kernel = stride: each output position reads pixels of its own, as a product does.

    Helps: patch embeddings, which oneDNN and cuDNN run in slow kernels; above all in training with a
    gradient of the input, which is another product.
    Hurts: the input is copied into rows, which small contiguous kernels (2x2) do not earn back.
    Sizes that do not divide run torch's own code.
    """

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


class KernelIsStride(Rewrite):
    """Rewrite convolutions whose kernel is their stride, and larger than one pixel."""

    def mismatch(self, module: Any) -> str:
        if module.kernel_size != module.stride:
            return f"kernel {module.kernel_size} is not the stride {module.stride}"
        return plain_reason(module) or (
            "" if prod(module.kernel_size) > 1 else "kernel is one pixel"
        )


REWRITE = KernelIsStride(
    "linear",
    {nn.Conv2d: LinearConv2d, nn.Conv3d: LinearConv3d},
    identity="y[n, o, p] = b[o] + sum over c, i of w[o, c, i] * x[n, c, p * k + i], for 0 <= i < k",
    phrase="a product",
)
