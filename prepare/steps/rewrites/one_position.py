"""The rewrite of convolutions whose kernel is as large as their input: a product with a view of it."""

from torch import Tensor, nn

from prepare.steps.rewrites.base import Rewrite
from prepare.steps.rewrites.linear import KernelIsStride, Linear


class OnePosition(Linear):
    """A convolution of patches that are cut already: the patch is a row, and nothing is copied.

    Helps: the vision towers of Qwen2-VL, Qwen3-VL and others, which cut patches before the convolution.
    Hurts: nothing that we measured; larger inputs run torch's own code.
    """

    def _takes(self, x: Tensor) -> bool:
        return tuple(x.shape[2:]) == tuple(self.kernel_size)


class OnePositionConv2d(OnePosition, nn.Conv2d):
    """torch's Conv2d on inputs as large as its kernel, as a product."""


class OnePositionConv3d(OnePosition, nn.Conv3d):
    """torch's Conv3d on inputs as large as its kernel, as a product."""


REWRITE: Rewrite = KernelIsStride(
    "one_position",
    {nn.Conv2d: OnePositionConv2d, nn.Conv3d: OnePositionConv3d},
    identity="y[n, o, 0] = b[o] + sum over c, i of w[o, c, i] * x[n, c, i]",
    phrase="a product",
    never_loses=True,
)
