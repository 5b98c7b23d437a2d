"""The repair of 3-d convolutions on a CPU: the kernels that are quick, and those that are right."""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from prepare.steps.repairs import _conv_as_matmul
from prepare.steps.repairs._norm_autograd import contiguous_copy, through_contiguous
from prepare.steps.repairs.base import SwapClass, is_channels_last

# The limits of `use_mkldnn` in torch's aten/src/ATen/native/Convolution.cpp: at batch 1 and without
# groups no more than so many elements in C * D * H; and the batch from which 1x1x1 kernels take oneDNN.
_SMALL = 20480
_MANY = 16


class KeepingConv3d(nn.Conv3d):
    """torch's Conv3d, but a small convolution of one channels-last sample runs in groups of its outputs.

    One with a large weight that gives few pixels runs as one matrix product, as `KeepingConv2d` does. One
    in bfloat16 that is trained gets its zeros beforehand where they make the input as large as the
    kernel: for the weight's gradient of a smaller one oneDNN gives garbage.
    Helps: in float32, torch's own takes reference kernels there, several times slower, which give contiguous
    activations; with groups it takes oneDNN. A 1x1x1 kernel runs as a matrix product.
    Hurts: the input is kept twice for the backward pass. Numbers are rounded as at batch 2 and above: over
    several thousand products up to 10 times the reference kernels' error (1e-5 of a deviation).
    Source: `torch._C._select_conv_backend` says Slow3d at batch 1 and Mkldnn at batch 2; the known issue
    conv3d_bfloat16_small_cpu.
    """

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:  # noqa: A002
        if _conv_as_matmul.helps(self, input, weight):
            return _conv_as_matmul.product(self, input, weight, bias)
        if _is_trained(self, input) and _reads_beyond(self, input, input.shape[-3:]):
            x = F.pad(input, _zeros(self))
            return F.conv3d(x, weight, bias, self.stride, 0, self.dilation, self.groups)
        if not _fits(self, input, weight):
            return super()._conv_forward(input, weight, bias)
        x, padding = input, self.padding
        if self.padding_mode != "zeros":
            x, padding = F.pad(x, self._reversed_padding_repeated_twice, mode=self.padding_mode), 0
            x = x.contiguous(memory_format=torch.channels_last_3d)
        small = _is_small(x, weight)
        alone = len(x) < _MANY and torch.get_num_threads() == 1
        if (small or alone) and _is_product(self, padding):
            return F.linear(x.movedim(1, -1), weight.flatten(1), bias).movedim(-1, 1)
        if not small:
            return F.conv3d(x, weight, bias, self.stride, padding, self.dilation)
        for groups in (2, 3, 5):
            if len(weight) % groups == 0:
                x = torch.cat([x] * groups, 1)
                return F.conv3d(x, weight, bias, self.stride, padding, self.dilation, groups)
        # A prime number of outputs, or one: of two samples, which even so is faster.
        return F.conv3d(torch.cat([x, x]), weight, bias, self.stride, padding, self.dilation)[:1]


class KeepingConvTranspose3d(nn.ConvTranspose3d):
    """torch's ConvTranspose3d, but a small one of one channels-last sample runs in two groups of its outputs.

    A depthwise one whose weight is trained runs on contiguous copies of input and weight, since
    oneDNN's channels-last kernel gives garbage for the weight's gradient. So it does in bfloat16 for
    outputs smaller than the kernel: those are cut out of larger ones.
    Helps and hurts: as `KeepingConv3d`; the weight is copied as well. Where the outputs are no multiple
    of 16 oneDNN is not faster: then the reference kernel runs, on contiguous copies. A depthwise one of
    many pixels takes longer contiguously.
    Source: as `KeepingConv3d`; the known issue depthwise_transposed_conv3d_cpu.
    """

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:  # noqa: A002
        if _is_trained(self, input):
            added = self._added(input, output_size)
            if _reads_beyond(self, input, self._sizes(input, added)):
                how = (self.stride, 0, added, self.groups, self.dilation)
                whole = F.conv_transpose3d(input, self.weight, self.bias, *how)
                return F.pad(whole, [-number for number in _zeros(self)])
            if _gives_garbage(self, input):
                return self._contiguously(input, added)
        fits = _fits(self, input, self.weight) and self.padding_mode == "zeros"
        if not fits or not _is_small(input, self.weight):
            return super().forward(input, output_size)
        if self.out_channels % 16:
            return through_contiguous(
                lambda x: nn.ConvTranspose3d.forward(self, x, output_size), input
            )
        x = torch.cat([input, input], 1)
        weight = torch.cat(self.weight.chunk(2, 1))
        added = self._added(input, output_size)
        return F.conv_transpose3d(
            x, weight, self.bias, self.stride, self.padding, added, 2, self.dilation
        )

    def _contiguously(self, x: Tensor, added: list[int]) -> Tensor:
        # With one channel in each group its strides may mean either format: those of a copy do not.
        weight = contiguous_copy(self.weight)
        how = (self.bias, self.stride, self.padding, added, self.groups, self.dilation)
        if x.dim() == 4 or not is_channels_last(x):  # 4: a sample without a batch
            return F.conv_transpose3d(contiguous_copy(x), weight, *how)
        return through_contiguous(lambda x: F.conv_transpose3d(x, weight, *how), x)

    def _added(self, x: Tensor, output_size: list[int] | None) -> list[int]:
        """Its output padding, for the size that is asked for."""
        return self._output_padding(
            x, output_size, self.stride, self.padding, self.kernel_size, 3, self.dilation
        )

    def _sizes(self, x: Tensor, added: list[int]) -> list[int]:
        """Its output's in space."""
        each = zip(
            x.shape[-3:],
            self.stride,
            self.padding,
            self.kernel_size,
            self.dilation,
            added,
            strict=True,
        )
        return [
            (size - 1) * stride - 2 * cut + (kernel - 1) * step + more + 1
            for size, stride, cut, kernel, step, more in each
        ]


REPAIR = SwapClass("conv3d", {nn.Conv3d: KeepingConv3d, nn.ConvTranspose3d: KeepingConvTranspose3d})


def goes_beyond(module: nn.Module, given: Tensor, output: Tensor) -> bool:
    """Whether torch's backward of a module that is not repaired may read and write beyond its memory."""
    transposed = isinstance(module, nn.ConvTranspose3d)
    if not (transposed or isinstance(module, nn.Conv3d)) or REPAIR.is_repaired(module):
        return False
    sizes = (output if transposed else given).shape[-3:]
    return _reads_beyond(module, given, sizes) and _is_trained(module, given)


def _fits(module: nn.Module, x: Tensor, weight: Tensor) -> bool:
    """Whether oneDNN could replace a kernel that torch takes here. A compiler is to see torch's own."""
    return (
        not torch.compiler.is_compiling()
        and module.groups == 1
        and x.dtype == weight.dtype == torch.float32
        and x.device.type == "cpu"
        and x.dim() == 5
        and is_channels_last(x)
        and x.shape[1] == module.in_channels
        and x.numel() > 0
        and torch._C._get_mkldnn_enabled()
        and not torch.is_autocast_enabled("cpu")
    )


def _is_trained(module: nn.Module, x: Tensor) -> bool:
    """Whether a gradient of its weight may be asked for, on a CPU."""
    return (
        module.weight.requires_grad
        and torch.is_grad_enabled()
        and x.device.type == "cpu"
        and x.dim() in (4, 5)
    )


def _reads_beyond(module: nn.Conv3d | nn.ConvTranspose3d, x: Tensor, sizes: Sequence[int]) -> bool:
    """Whether the weight's gradient may be wrong: in bfloat16, also where autocast casts to it.

    `sizes` are those that the kernel is moved over: of the input, or of a transposed one's output.
    """
    extents = zip(sizes, module.kernel_size, module.dilation, strict=True)
    return (
        (x.dtype == torch.bfloat16 or torch.is_autocast_enabled("cpu"))
        and module.padding_mode == "zeros"
        and any(0 < size <= (kernel - 1) * step for size, kernel, step in extents)
    )


def _zeros(module: nn.Conv3d | nn.ConvTranspose3d) -> list[int]:
    """How many it adds before and after each dimension, of the last one first."""
    if isinstance(module.padding, str):
        return module._reversed_padding_repeated_twice
    return [number for number in reversed(module.padding) for _ in range(2)]


def _gives_garbage(module: nn.ConvTranspose3d, x: Tensor) -> bool:
    """Whether the weight's gradient may be wrong, whatever the layout of `x`: the weight's is enough."""
    return module.groups == module.in_channels > 1 and x.dtype == torch.float32


def _is_small(x: Tensor, weight: Tensor) -> bool:
    *_, height, width = weight.shape
    return len(x) == 1 and prod(x.shape[1:4]) <= _SMALL and not (height > 3 and width > 3)


def _is_product(module: nn.Conv3d, padding: str | int | tuple[int, ...]) -> bool:
    # Of a single number neither "same" nor "valid" leaves anything to pad.
    padded = any(padding) if isinstance(padding, tuple) else padding not in (0, "same", "valid")
    return prod(module.kernel_size) == prod(module.stride) == 1 and not padded
