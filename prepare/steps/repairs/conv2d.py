"""The repair of 2-d convolutions on a CPU: with few output pixels, narrow strided and grouped ones.

oneDNN reorders a weight in every call, and torch its gradient once more: with few pixels, that is a
large part of the time; a matrix product needs no copy. A strided 1x1 convolution of few channels is run on
the pixels that it reads, because its own backward writes outside its memory. A grouped one gets a
single sample with the exact strides of the format, because its own backward misreads others.
"""

from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from prepare.core.model.issue_sizes import (
    has_few_pixels,
    has_large_weight,
    is_narrow_strided,
    is_partly_grouped,
)
from prepare.core.model.unsafe_backward import is_unsafe_conv2d
from prepare.steps.repairs.base import (
    is_channels_last,
    not_a_view,
    with_channels_last_grad,
    with_exact_strides,
)
from prepare.steps.repairs.swap_class import SwapClass


class KeepingConv2d(nn.Conv2d):
    """torch's Conv2d, but run as one matrix product if the weight is large and there are few output pixels.

    In training, a strided 1x1 convolution of fewer than 16 channels gets the pixels that it reads, by an
    average pooling of single pixels, and runs with stride 1: the result is the same. A grouped one gets a
    single sample that is a view, as `tokens.transpose(1, 2).reshape(1, C, H, W)`, with exact strides.

    Helps: the last stages of image networks at small batches. torch's kernel reorders the channels-last
    weight in every call, and its gradient once more.
    Hurts: the input is stored for the backward pass once for each kernel position, at most an eighth of
    the size of the weight. Products are summed in another order.
    Source: measured; in a profile of torch's backward, an `aten::copy_` of the weight's shape. oneDNN#6035;
    the known issue conv2d_grouped_view_cpu.
    """

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:  # noqa: A002
        if is_product(self, input, weight):
            return multiply(self, input, weight, bias)
        if is_narrow_strided(self) and is_unsafe_conv2d(input, weight, stride=self.stride):
            # Not a slice, whose gradient would be contiguous.
            return F.conv2d(F.avg_pool2d(input, 1, self.stride), weight, bias)
        if is_partly_grouped(self) and _is_view_of_one_sample(input):
            input = with_exact_strides(input) if input.dim() == 4 else input.contiguous()  # noqa: A001
        return super()._conv_forward(input, weight, bias)


class _LargeConvRepair(SwapClass):
    """Repair only convolutions for which a matrix product may be faster, or whose backward is not safe."""

    def concerns(self, module: nn.Module) -> bool:
        if not super().concerns(module):
            return False
        return has_large_weight(module) or is_narrow_strided(module) or is_partly_grouped(module)


REPAIR = _LargeConvRepair("conv2d", {nn.Conv2d: KeepingConv2d})


def _is_view_of_one_sample(x: Tensor) -> bool:
    """Return whether `x` is one channels-last sample on a CPU, whose stride over the batch is another's.

    torch adds the dimension of the batch to a sample without one, with such a stride.
    """
    if x.device.type != "cpu" or torch.compiler.is_compiling() or x.stride()[-3:-2] != (1,):
        return False
    return x.dim() == 3 or (x.dim() == 4 and len(x) == 1 and x.stride(0) != x[0].numel())


def is_product(module: nn.Conv2d | nn.Conv3d, x: Tensor, weight: Tensor) -> bool:
    """Return whether a product is faster for `x`; never while compiling: a compiler sees torch's code."""
    return (
        has_large_weight(module)
        and not torch.compiler.is_compiling()
        and x.dim() == weight.dim()
        and x.device.type == "cpu"
        and x.dtype == weight.dtype
        and x.dtype in (torch.float32, torch.bfloat16)
        and not torch.is_autocast_enabled("cpu")
        and x.shape[1] == module.in_channels
        and has_few_pixels(module, x.shape)
        and is_channels_last(x)
        and (prod(module.kernel_size) == 1 or is_channels_last(weight))
    )


def multiply(
    module: nn.Conv2d | nn.Conv3d, x: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    """Return the output of the convolution for `x` (N, C, *spatial), in channels-last."""
    padding: Any = module.padding  # not a string: see `has_large_weight`
    if any(padding):  # the gradient of a padded tensor is a slice, with the strides of the whole
        x = with_channels_last_grad(x)
    x = x.movedim(1, -1)
    if any(padding):
        x = F.pad(x, [0, 0, *(n for n in reversed(padding) for _ in range(2))])
    channels = x.dim() - 1
    for dim, (size, stride, step) in enumerate(
        zip(module.kernel_size, module.stride, module.dilation, strict=True), start=1
    ):
        x = x.unfold(dim, (size - 1) * step + 1, stride)[..., ::step]
    rows = x.movedim(channels, -1).flatten(channels)  # (N, *spatial, kernel * C)
    return not_a_view(F.linear(rows, weight.movedim(1, -1).flatten(1), bias).movedim(-1, 1))
