"""The rewrites of convolutions: another operation that is exactly equal, as a product or a 2-d convolution.

A rewritten module has a class named by its rewrite (`LinearConv2d`): a subclass of its original class, with
the same Parameters, which runs torch's own code for calls that the rewrite is not for.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.modules.conv import _ConvNd

from prepare.core.model.module_kinds import has_own_sizes, is_transformed
from prepare.core.model.tensors import is_lazy, is_plain
from prepare.steps.repairs import all_repairs
from prepare.steps.repairs.base import (
    SwapClass,
    is_channels_last,
    not_a_view,
    with_channels_last_grad,
)


class Rewritten(_ConvNd):
    """A convolution that computes the calls for which its rewrite is, and lets torch compute the others."""

    rewritten_as: ClassVar[str]
    """The name of the rewrite."""
    in_channels_last = False
    """Whether the pipeline requests channels-last of its output, whatever the format of its weight."""
    chosen_for: tuple[Any, ...] = ()
    """The attributes for which the rewrite was chosen: others that are set later are for torch's code."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:  # noqa: A002
        result = self.served(input, weight, bias)
        return super()._conv_forward(input, weight, bias) if result is None else result

    def served(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        """Return the result of the rewrite; None if the rewrite is not for this call."""
        is_same = (*sizes_of(self), self.kernel_size) == (*self.chosen_for, weight.shape[2:])
        if not (is_same and _is_common(x, weight, self.groups) and self._takes(x)):
            return None
        return self._compute(x, weight, bias)

    def _takes(self, x: Tensor) -> bool:
        """Return whether the rewrite is for an input of these sizes. Pure, and cheap."""
        return True

    def _compute(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        raise NotImplementedError

    def _is_last(self, x: Tensor, weight: Tensor) -> bool:
        """Return whether torch's convolution would return channels-last."""
        return self.in_channels_last or is_channels_last(x) or is_channels_last(weight)


class Rewrite(SwapClass):
    """Replace the operation of convolutions of one structure by an exact identity, `phrase`.

    `never_loses` is whether it was never slower in our measurements, for any call that it takes: then it
    needs no example.
    """

    step: ClassVar[str] = "rewrite_conv"
    phrase: ClassVar[str]
    never_loses: ClassVar[bool] = False

    def mismatch(self, module: Any) -> str:
        """Return what of the structure of a convolution this rewrite is not for; empty if it fits."""
        raise NotImplementedError

    def reason(self, module: nn.Module) -> str:
        """Return why this rewrite is not for `module`; empty if it is. Pure."""
        if not self.concerns(module):
            kinds = " or ".join(sorted(kind.__name__ for kind in self.swaps))
            return f"{type(module).__name__} is no {kinds}"
        if not has_own_sizes(module):
            return "a size of it is no tuple, as torch makes them"
        if mismatch := self.mismatch(module):
            return mismatch
        if not (self.is_repaired(module) or super().fits(module)):
            return f"a call of {type(module).__name__} does not run torch's own code"
        weight = module._parameters.get("weight")
        if weight is not None and not (is_lazy(weight) or is_plain(weight)):
            return f"its weight is a {type(weight).__name__}"
        return ""

    def fits(self, module: nn.Module) -> bool:
        return not self.is_repaired(module) and not self.reason(module)

    def repair(self, module: nn.Module, formats: Mapping[int, str]) -> None:
        with _without_repairs(module):
            super().repair(module, formats)
        conv: Any = module
        vars(module)["chosen_for"] = sizes_of(conv)
        if len(conv.kernel_size) + 2 in formats:
            vars(module)["in_channels_last"] = True

    def undo(self, module: nn.Module) -> None:
        with _without_repairs(module):
            super().undo(module)
        vars(module).pop("chosen_for", None)
        vars(module).pop("in_channels_last", None)


@contextmanager
def _without_repairs(module: nn.Module) -> Iterator[None]:
    """Take the repairs of the class off for the block: they lie over a rewrite, as its `super()`."""
    every = all_repairs().values()
    found = [each for each in every if each.swaps and each.is_repaired(module)]
    for repair in found:
        repair.undo(module)
    yield
    for repair in reversed(found):
        repair.repair(module, {})


def sizes_of(module: Any) -> tuple[Any, ...]:
    """Return what torch reads in each call of a convolution besides its tensors."""
    return module.stride, module.padding, module.dilation, module.groups, module.padding_mode


def plain_reason(module: Any) -> str:
    """Return what is more than a kernel and a stride: padding, dilation or groups; empty if nothing."""
    if any(_padding(module)):
        return f"padding {module.padding} is not 0"
    if any(
        step != 1
        for size, step in zip(module.kernel_size, module.dilation, strict=True)
        if size > 1
    ):
        return f"dilation {module.dilation} is not 1"
    return "" if module.groups == 1 else f"groups {module.groups} are not 1"


def _padding(module: Any) -> Sequence[int]:
    is_zeros = module.padding_mode == "zeros" and not isinstance(module.padding, str)
    return module.padding if is_zeros else module._reversed_padding_repeated_twice


def multiply(module: Rewritten, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return a convolution with kernel = stride as a product, in the layout of torch's result.

    `x` and `weight` are read as they lie: the columns are (C, k) for a contiguous weight and (k, C) for a
    channels-last one, which is a view of it. With one output position the rows are a view of the input.
    """
    last, by_channel = module._is_last(x, weight), not is_channels_last(weight)
    if by_channel and is_channels_last(x):
        x = with_channels_last_grad(x)
    number, channels, *sizes = x.shape
    positions = [size // step for size, step in zip(sizes, module.kernel_size, strict=True)]
    pairs = zip(positions, module.kernel_size, strict=True)
    x = x.reshape(number, channels, *(size for pair in pairs for size in pair))
    outer, inner = range(2, x.dim(), 2), range(3, x.dim(), 2)
    order = (1, *inner) if by_channel else (*inner, 1)
    rows = x.permute(0, *outer, *order).flatten(len(sizes) + 1)
    matrix = as_matrix(weight)
    if prod(positions) == 1:
        result = F.linear(rows.flatten(0, -2), matrix, bias)
        ones = [1] * len(sizes)
        shaped = (
            result.view(number, *ones, -1).movedim(-1, 1)
            if last
            else result.view(number, -1, *ones)
        )
        return not_a_view(shaped)
    if last or number > 1:
        result = F.linear(rows, matrix, bias).movedim(-1, 1)
        return not_a_view(result) if last else result.contiguous()
    columns = rows.flatten(0, -2).t()
    result = matrix @ columns if bias is None else torch.addmm(bias[:, None], matrix, columns)
    return not_a_view(result.view(1, -1, *positions))


def as_matrix(weight: Tensor) -> Tensor:
    """Return a weight as (O, C * k), or as (O, k * C) if it is in channels-last: a view of it."""
    return (weight.movedim(1, -1) if is_channels_last(weight) else weight).flatten(1)


def in_format(x: Tensor, *, last: bool) -> Tensor:
    """Return `x` in channels-last or contiguous, with exact strides for sizes of 1; no view of a result."""
    x = (x.movedim(1, -1) if last else x).contiguous()
    x = x.flatten().view(x.shape)
    return not_a_view(x.movedim(-1, 1) if last else x)


def _is_common(x: Tensor, weight: Tensor, groups: int) -> bool:
    """Return whether a call is one of batches of plain tensors, with sizes that are known."""
    return (
        x.dim() == weight.dim()
        and x.layout is weight.layout is torch.strided
        and all(isinstance(size, int) for size in x.shape[1:])
        and x.shape[1] == weight.shape[1] * groups
        and 0 not in x.shape
        and x.device == weight.device
        and (x.dtype == weight.dtype or torch.is_autocast_enabled(x.device.type))
    )


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
        if module.padding_mode != "zeros":
            return f"padding_mode {module.padding_mode} is not zeros"
        return fault_in_2d(module)


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
        if module.dilation[0] > 1:
            return f"dilation {module.dilation} is not 1 in time"
        return fault_in_2d(module)


def fault_in_2d(module: Any) -> str:
    """Return what torch's 2-d convolutions break on, and its 3-d ones do not; empty if nothing."""
    if module.groups > 1 and prod(module.dilation) > 1:  # conv2d_grouped_dilated_bfloat16_cpu
        return f"groups {module.groups} come with dilation {module.dilation}"
    if module.in_channels == module.groups and module.stride[-1] > 1 == module.stride[-2]:
        # In channels-last, where one column of outputs remains, oneDNN computes wrong rows.
        return f"stride {module.stride} comes with one channel"
    padding = () if isinstance(module.padding, str) else module.padding
    sizes = zip(padding, module.kernel_size, module.dilation, strict=False)
    if any(pad > step * (size - 1) for pad, size, step in sizes if pad):
        # Where an output sees padding alone, oneDNN may end the process.
        return f"padding {module.padding} is as wide as the kernel"
    return ""


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


REWRITES = (
    _KernelIsStride("linear", LinearConv2d, LinearConv3d),
    _OnePosition("one_position", OnePositionConv2d, OnePositionConv3d),
    _OnePixel("pointwise", PointwiseConv2d, PointwiseConv3d),
    _Flat("lower_rank", LowerRankConv3d),
    _Causal("one_frame", OneFrameConv3d),
)
