"""The repairs of convolutions: fast and correct kernels on a CPU, and computed weights in channels-last."""

from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils import parametrize

from prepare.core.model import known_issues
from prepare.core.model.module_kinds import has_own_sizes, mark_repair
from prepare.core.model.tensors import computed_names, weight_hooks
from prepare.core.model.unsafe_backward import is_unsafe_conv2d
from prepare.steps.repairs import base
from prepare.steps.repairs._norm_autograd import contiguous_copy, through_contiguous
from prepare.steps.repairs.base import SwapClass, is_channels_last, not_a_view, to_channels_last


class KeepingConv2d(nn.Conv2d):
    """torch's Conv2d, but run as one matrix product if the weight is large and there are few output pixels.

    In training, a strided 1x1 convolution of fewer than 16 channels gets the pixels that it reads, by an
    average pooling of single pixels, and runs with stride 1: the result is the same. A grouped one gets a
    single sample that is a view, as `tokens.transpose(1, 2).reshape(1, C, H, W)`, with exact strides. With
    groups and dilation it runs on contiguous copies in bfloat16.

    Helps: the last stages of image networks at small batches. torch's kernel reorders the channels-last
    weight in every call, and its gradient once more.
    Hurts: the input is stored for the backward pass once for each kernel position, at most an eighth of
    the size of the weight. Products are summed in another order.
    Source: measured; in a profile of torch's backward, an `aten::copy_` of the weight's shape. oneDNN#6035;
    the known issues conv2d_grouped_view_cpu and conv2d_grouped_dilated_bfloat16_cpu.
    """

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:  # noqa: A002
        if not has_own_sizes(self):
            return super()._conv_forward(input, weight, bias)
        if is_product(self, input, weight):
            return multiply(self, input, weight, bias)
        if known_issues.is_narrow_strided(self) and is_unsafe_conv2d(
            input, weight, stride=self.stride
        ):
            # Not a slice, whose gradient would be contiguous.
            return F.conv2d(F.avg_pool2d(input, 1, self.stride), weight, bias)
        if _has_unset_gradient(self, input, weight):
            run = super()._conv_forward
            if input.dim() == 3:  # a sample without a batch
                return run(contiguous_copy(input), contiguous_copy(weight), bias)
            return through_contiguous(lambda x: run(x, contiguous_copy(weight), bias), input)
        if known_issues.is_partly_grouped(self) and _is_view_of_one_sample(input):
            input = base.with_exact_strides(input) if input.dim() == 4 else input.contiguous()  # noqa: A001
        return super()._conv_forward(input, weight, bias)


class _LargeConvRepair(SwapClass):
    """Repair only convolutions for which a matrix product may be faster, or whose backward is not safe."""

    def concerns(self, module: nn.Module) -> bool:
        if not super().concerns(module):
            return False
        sizes = known_issues
        kinds = (
            *(sizes.has_large_weight, sizes.is_narrow_strided),
            *(sizes.is_partly_grouped, sizes.is_grouped_dilated),
        )
        return any(is_one(module) for is_one in kinds)


def _is_view_of_one_sample(x: Tensor) -> bool:
    """Return whether `x` is one channels-last sample on a CPU, whose stride over the batch is another's.

    torch adds the dimension of the batch to a sample without one, with such a stride.
    """
    if x.device.type != "cpu" or torch.compiler.is_compiling() or x.stride()[-3:-2] != (1,):
        return False
    return x.dim() == 3 or (x.dim() == 4 and len(x) == 1 and x.stride(0) != x[0].numel())


def _has_unset_gradient(module: nn.Conv2d, x: Tensor, weight: Tensor) -> bool:
    """Return whether torch leaves the gradient of the weight unset: conv2d_grouped_dilated_bfloat16_cpu."""
    return (
        known_issues.is_grouped_dilated(module)
        and (x.dtype == torch.bfloat16 or torch.is_autocast_enabled("cpu"))
        and weight.requires_grad
        and torch.is_grad_enabled()
        and x.device.type == "cpu"
        and not torch.compiler.is_compiling()
    )


def is_product(module: nn.Conv2d | nn.Conv3d, x: Tensor, weight: Tensor) -> bool:
    """Return whether a product is faster for `x`; never while compiling: a compiler sees torch's code."""
    return (
        known_issues.has_large_weight(module)
        and not torch.compiler.is_compiling()
        and x.dim() == weight.dim()
        and x.device.type == "cpu"
        and x.dtype == weight.dtype
        and x.dtype in (torch.float32, torch.bfloat16)
        and not torch.is_autocast_enabled("cpu")
        and (x.shape[1], *weight.shape[2:]) == (module.in_channels, *module.kernel_size)
        and known_issues.has_few_pixels(module, x.shape)
        and is_channels_last(x)
        and (prod(module.kernel_size) == 1 or is_channels_last(weight))
    )


def multiply(
    module: nn.Conv2d | nn.Conv3d, x: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    """Return the output of the convolution for `x` (N, C, *spatial), in channels-last."""
    padding: Any = module.padding  # not a string: see `has_large_weight`
    if any(padding):  # the gradient of a padded tensor is a slice, with the strides of the whole
        x = base.with_channels_last_grad(x)
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


# The limits of `use_mkldnn` in torch's aten/src/ATen/native/Convolution.cpp: at batch 1 and without groups,
# at most this many elements in C * D * H; and the batch size from which 1x1x1 kernels use oneDNN.
_MAX_ELEMENTS = 20480
_MIN_BATCH = 16


class KeepingConv3d(nn.Conv3d):
    """torch's Conv3d, but a small convolution of one channels-last sample runs in groups of its outputs.

    With a large weight and few output pixels it runs as one matrix product, as `KeepingConv2d` does. In
    bfloat16 training, an input that only its padding makes as large as the kernel is padded beforehand:
    oneDNN computes garbage for the weight gradient of an input smaller than the kernel.
    Helps: in float32, torch uses slow reference kernels here, several times slower, which return contiguous
    activations; with groups it uses oneDNN. A 1x1x1 kernel runs as a matrix product.
    Hurts: the input is stored twice for the backward pass. Numbers are rounded as at batch 2 and above: over
    several thousand products up to 10 times the reference kernels' error (1e-5 of a deviation).
    Source: `torch._C._select_conv_backend` returns Slow3d at batch 1 and Mkldnn at batch 2; the known issue
    conv3d_bfloat16_small_cpu.
    """

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:  # noqa: A002
        if not has_own_sizes(self):
            return super()._conv_forward(input, weight, bias)
        if is_product(self, input, weight):
            return multiply(self, input, weight, bias)
        if _is_trained(weight, input) and _kernel_exceeds(self, input, input.shape[-3:]):
            x = F.pad(input, _zero_padding(self))
            return F.conv3d(x, weight, bias, self.stride, 0, self.dilation, self.groups)
        if not _can_use_onednn(self, input, weight):
            return super()._conv_forward(input, weight, bias)
        x = input
        padding: str | int | tuple[int, ...] = self.padding
        if self.padding_mode != "zeros":
            x, padding = F.pad(x, self._reversed_padding_repeated_twice, mode=self.padding_mode), 0
            x = to_channels_last(x)
        small = _is_small(x, weight)
        single_thread = len(x) < _MIN_BATCH and torch.get_num_threads() == 1
        if (small or single_thread) and _is_matrix_product(self, padding):
            # Not weight.flatten(1): its gradient has contiguous strides, which DDP copies and warns of.
            matrix = weight.movedim(1, -1).flatten(1)
            return not_a_view(F.linear(x.movedim(1, -1), matrix, bias).movedim(-1, 1))
        if not small:
            return F.conv3d(x, weight, bias, self.stride, padding, self.dilation)
        for groups in (2, 3, 5):
            if len(weight) % groups == 0:
                x = torch.cat([x] * groups, 1)
                return F.conv3d(x, weight, bias, self.stride, padding, self.dilation, groups)
        # No such divisor: run two samples, which is still faster.
        both = F.conv3d(torch.cat([x, x]), weight, bias, self.stride, padding, self.dilation)
        return not_a_view(both[:1])


class KeepingConvTranspose3d(nn.ConvTranspose3d):
    """torch's ConvTranspose3d, but a small one of one channels-last sample runs in two groups of its outputs.

    A depthwise convolution whose weight is trained runs on contiguous copies of input and weight, because
    oneDNN's channels-last kernel computes garbage for the weight gradient. The same happens in bfloat16 for
    outputs smaller than the kernel: those are cut out of larger outputs.
    Helps and hurts: as `KeepingConv3d`; the weight is copied as well. If the number of outputs is not a
    multiple of 16, oneDNN is not faster: then the reference kernel runs, on contiguous copies. A depthwise
    convolution of many pixels takes longer contiguously.
    Source: as `KeepingConv3d`; the known issue depthwise_transposed_conv3d_cpu.
    """

    if TYPE_CHECKING:
        padding: tuple[int, ...]  # never a string in a transposed convolution

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:  # noqa: A002
        if self.padding_mode != "zeros" or not has_own_sizes(self):
            return super().forward(input, output_size)
        weight, bias = self.weight, self.bias
        geometry: Any = (self.stride, self.padding, self.kernel_size, 3, self.dilation)
        output_padding = self._output_padding(input, output_size, *geometry)

        def run_torchs(x: Tensor, weight: Tensor) -> Tensor:
            options = self.stride, self.padding, output_padding, self.groups, self.dilation
            return F.conv_transpose3d(x, weight, bias, *options)

        if _is_trained(weight, input):
            if _kernel_exceeds(self, input, self._output_sizes(input, output_padding)):
                options = (self.stride, 0, output_padding, self.groups, self.dilation)
                uncropped = F.conv_transpose3d(input, weight, bias, *options)
                return F.pad(uncropped, [-number for number in _zero_padding(self)])
            if _has_wrong_weight_gradient(self, input):
                # With one channel in each group, the weight's strides fit both formats: a copy's only one.
                weight = contiguous_copy(weight)
                if input.dim() == 4 or not is_channels_last(input):  # 4: a sample without a batch
                    return run_torchs(contiguous_copy(input), weight)
                return through_contiguous(lambda x: run_torchs(x, weight), input)
        if not (_can_use_onednn(self, input, weight) and _is_small(input, weight)):
            return run_torchs(input, weight)
        if self.out_channels % 16:
            return through_contiguous(lambda x: run_torchs(x, weight), input)
        x = torch.cat([input, input], 1)
        halves = torch.cat(weight.chunk(2, 1))
        return F.conv_transpose3d(
            x, halves, bias, self.stride, self.padding, output_padding, 2, self.dilation
        )

    def _output_sizes(self, x: Tensor, output_padding: list[int]) -> list[int]:
        """Return the spatial sizes of the output."""
        dimensions = zip(
            x.shape[-3:],
            self.stride,
            self.padding,
            self.kernel_size,
            self.dilation,
            output_padding,
            strict=True,
        )
        return [
            (size - 1) * stride - 2 * cut + (kernel - 1) * step + added + 1
            for size, stride, cut, kernel, step, added in dimensions
        ]


CONV2D = _LargeConvRepair("conv2d", KeepingConv2d)
CONV3D = SwapClass("conv3d", KeepingConv3d, KeepingConvTranspose3d)


def backward_exceeds_memory(module: nn.Module, x: Tensor, output: Tensor) -> bool:
    """Return whether torch's backward of an unrepaired module may read and write outside its tensors."""
    if not isinstance(module, (nn.Conv3d, nn.ConvTranspose3d)) or CONV3D.mends(module):
        return False
    sizes = (output if isinstance(module, nn.ConvTranspose3d) else x).shape[-3:]
    weight = next(module.parameters())  # also where it computes the weight
    return _kernel_exceeds(module, x, sizes) and _is_trained(weight, x)


def _can_use_onednn(module: nn.Conv3d | nn.ConvTranspose3d, x: Tensor, weight: Tensor) -> bool:
    """Return whether oneDNN could replace torch's kernel; never while compiling."""
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


def _is_trained(weight: Tensor, x: Tensor) -> bool:
    """Return whether a backward on a CPU may compute the gradient of the weight."""
    return (
        weight.requires_grad
        and torch.is_grad_enabled()
        and x.device.type == "cpu"
        and x.dim() in (4, 5)
    )


def _kernel_exceeds(
    module: nn.Conv3d | nn.ConvTranspose3d, x: Tensor, sizes: Sequence[int]
) -> bool:
    """Return whether the kernel is larger than `sizes`, in bfloat16: then the weight gradient may be wrong.

    Also true if autocast casts to bfloat16. `sizes` are the spatial sizes over which the kernel moves: of
    the input, or for a transposed convolution of the output.
    """
    return (
        (x.dtype == torch.bfloat16 or torch.is_autocast_enabled("cpu"))
        and module.padding_mode == "zeros"
        and known_issues.is_smaller_than_kernel(module, sizes)
    )


def _zero_padding(module: nn.Conv3d | nn.ConvTranspose3d) -> list[int]:
    """Return the padding before and after each dimension, last dimension first, as F.pad takes it."""
    if isinstance(module.padding, str):
        return module._reversed_padding_repeated_twice
    return [number for number in reversed(module.padding) for _ in range(2)]


def _has_wrong_weight_gradient(module: nn.ConvTranspose3d, x: Tensor) -> bool:
    """Return whether the weight gradient may be wrong; a channels-last weight is enough, for any input."""
    return module.groups == module.in_channels > 1 and x.dtype == torch.float32


def _is_small(x: Tensor, weight: Tensor) -> bool:
    *_, height, width = weight.shape
    return len(x) == 1 and prod(x.shape[1:4]) <= _MAX_ELEMENTS and not (height > 3 and width > 3)


def _is_matrix_product(module: nn.Conv3d, padding: str | int | tuple[int, ...]) -> bool:
    # For a kernel of size 1, neither "same" nor "valid" pads anything.
    padded = any(padding) if isinstance(padding, tuple) else padding not in (0, "same", "valid")
    return prod(module.kernel_size) == prod(module.stride) == 1 and not padded


_CONVOLUTIONS = {4: (nn.Conv2d, nn.ConvTranspose2d), 5: (nn.Conv3d, nn.ConvTranspose3d)}


class LaidOut(nn.Module):
    """The last parametrization of a convolution's weight: it makes the computed weight channels-last.

    Helps: weight_norm, spectral_norm and others return a contiguous weight, whatever their source tensors.
    Hurts: the weight is copied in each forward, or once in `parametrize.cached()`.
    Source: a parametrization without state; the keys of `state_dict` are the same.
    """

    def forward(self, weight: Tensor) -> Tensor:
        return to_channels_last(weight)

    def right_inverse(self, weight: Tensor) -> Tensor:
        """Pass an assigned weight on unchanged to the parametrizations before this one."""
        return weight


@mark_repair
class LaysOut:
    """A forward pre-hook that makes the weight of torch's older hooks (weight_norm, pruning) channels-last.

    Helps and hurts: as `LaidOut`. Does nothing once the other hooks are removed.
    """

    name = "weight"

    def __call__(self, module: Any, args: Any) -> None:
        if self.name not in module._parameters:
            module.weight = to_channels_last(module.weight)


class _ComputedWeight(SwapClass):
    """Add one parametrization, or one hook, after those that compute a convolution's weight."""

    def concerns(self, module: nn.Module) -> bool:
        return bool(self.ranks(module)) and "weight" in computed_names(module)

    def fits(self, module: nn.Module) -> bool:
        return self.concerns(module) and not self.is_repaired(module)

    def ranks(self, module: nn.Module) -> tuple[int, ...]:
        return tuple(rank for rank, classes in _CONVOLUTIONS.items() if isinstance(module, classes))

    def repair(self, module: nn.Module, formats: Mapping[int, str]) -> None:
        self.undo(module)  # others may have been added after ours
        if parametrize.is_parametrized(module, "weight"):
            _parametrizations(module).append(LaidOut().train(module.training))
        else:
            module.register_forward_pre_hook(LaysOut())

    def is_repaired(self, module: nn.Module) -> bool:
        if parametrize.is_parametrized(module, "weight"):
            return type(_parametrizations(module)[-1]) is LaidOut
        hooks = [hook for hook, name in weight_hooks(module) if name == "weight"]
        return bool(hooks) and type(hooks[-1]) is LaysOut

    def mends(self, module: nn.Module) -> bool:
        return self.is_repaired(module)

    def undo(self, module: nn.Module) -> None:
        if parametrize.is_parametrized(module, "weight"):
            parametrizations = _parametrizations(module)
            for index in reversed(range(len(parametrizations))):
                if type(parametrizations[index]) is LaidOut:
                    del parametrizations[index]
        hooks = module._forward_pre_hooks
        for key in [key for key, hook in hooks.items() if type(hook) is LaysOut]:
            del hooks[key]


REPAIRS = (CONV2D, CONV3D, _ComputedWeight("computed_weight"))


def _parametrizations(module: Any) -> Any:
    return module.parametrizations.weight
