"""A convolution that gives few pixels, as one matrix product with the channels-last weight as it lies.

oneDNN lays a weight out anew in each call, and torch its gradient once more: where the pixels are few,
that is a large part of the time.
"""

from math import prod

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from prepare.steps.repairs._channels_last_grad import gradient_laid_out
from prepare.steps.repairs.base import is_channels_last

# Elements: to lay a smaller weight out costs little.
_LARGE = 1 << 18
# So many channels for each pixel that comes out; with fewer, oneDNN's kernels gain more than that.
_FEW = 8


def may_help(module: nn.Conv2d | nn.Conv3d) -> bool:
    """Whether a convolution has a weight so large that a product may be faster, and pads with zeros."""
    size = module.in_channels * module.out_channels * prod(module.kernel_size)
    plain = module.padding_mode == "zeros" and not isinstance(module.padding, str)
    return plain and module.groups == 1 and size >= _LARGE


def helps(module: nn.Conv2d | nn.Conv3d, x: Tensor, weight: Tensor) -> bool:
    """Whether for this `x` it is; a compiler is to see torch's own."""
    return (
        may_help(module)
        and not torch.compiler.is_compiling()
        and x.dim() == weight.dim()
        and x.device.type == "cpu"
        and x.dtype == weight.dtype
        and x.dtype in (torch.float32, torch.bfloat16)
        and not torch.is_autocast_enabled("cpu")
        and x.shape[1] == module.in_channels
        and 0 < _FEW * _pixels(module, x) <= module.out_channels
        and is_channels_last(x)
        and (prod(module.kernel_size) == 1 or is_channels_last(weight))
    )


def product(
    module: nn.Conv2d | nn.Conv3d, x: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    """What the convolution gives for `x` (N, C, *spatial), in channels-last."""
    if any(module.padding):  # of what was padded, the gradient is a part with strides of the whole
        x = gradient_laid_out(x)
    x = x.movedim(1, -1)
    if any(module.padding):
        x = F.pad(x, [0, 0, *(n for n in reversed(module.padding) for _ in range(2))])
    channels = x.dim() - 1
    for dim, (size, stride, step) in enumerate(
        zip(module.kernel_size, module.stride, module.dilation, strict=True), start=1
    ):
        x = x.unfold(dim, (size - 1) * step + 1, stride)[..., ::step]
    rows = x.movedim(channels, -1).flatten(channels)  # (N, *spatial, kernel * C)
    return F.linear(rows, weight.movedim(1, -1).flatten(1), bias).movedim(-1, 1)


def _pixels(module: nn.Conv2d | nn.Conv3d, x: Tensor) -> int:
    """How many come out, of all samples."""
    each = zip(
        x.shape[2:],
        module.kernel_size,
        module.stride,
        module.padding,
        module.dilation,
        strict=True,
    )
    sizes = ((n + 2 * pad - (k - 1) * step - 1) // by + 1 for n, k, by, pad, step in each)
    return len(x) * prod(max(0, size) for size in sizes)
