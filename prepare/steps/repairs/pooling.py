"""The repairs of pooling, softmax and circular pads: outputs and gradients keep a channels-last layout."""

from collections.abc import Sequence
from math import isinf
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from prepare.steps.repairs import base
from prepare.steps.repairs.base import SwapClass, is_channels_last, not_a_view, to_channels_last


class KeepingAvgPool3d(nn.AvgPool3d):
    """torch's AvgPool3d that keeps a channels-last layout, as two 2-d poolings, which have such kernels.

    Helps: on a CPU torch's kernel copies a channels-last input and returns contiguous activations; this is
    also 2 to 10 times as fast as the contiguous kernel. Supports bfloat16 and float16, which torch does not.
    Hurts: in bfloat16 and float16 the numbers are rounded once more, between the two.
    Source: the average over a box is the average over its depth of the averages over its planes.
    """

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # torch's name
        if not _fits(input, 5):
            return super().forward(input)
        pooled = _average(
            _autocast(input),
            self,
            padding=self.padding,
            count=self.count_include_pad,
            divisor=self.divisor_override,
        )
        return not_a_view(pooled)


class KeepingLPPool3d(nn.LPPool3d):
    """torch's LPPool3d that keeps a channels-last layout: `KeepingAvgPool3d` between two powers."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        # With infinite power it is torch's max_pool3d, which keeps the layout.
        if not _fits(input, 5) or isinf(self.norm_type):
            return super().forward(input)
        kernel, power = _three(self.kernel_size), float(self.norm_type)
        mean = _average(_autocast(input.pow(power)), self)
        # As in torch: odd powers may leave negative sums.
        total = mean.sign() * mean.abs().relu() * (kernel[0] * kernel[1] * kernel[2])
        return total.pow(1.0 / power)


class KeepingAdaptiveAvgPool3d(nn.AdaptiveAvgPool3d):
    """torch's AdaptiveAvgPool3d that keeps a channels-last layout, forward and backward.

    Helps: on a CPU torch's kernel copies a channels-last input, and returns contiguous activations and
    gradients.
    Hurts: as `KeepingAvgPool3d`; pooling to one element is a single mean, as accurate as torch's.
    Source: as `KeepingAvgPool3d`; the windows of each dimension depend on that dimension alone.
    """

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        if not _fits(input, 5) or 0 in (size := _sizes(self.output_size, input.shape[2:])):
            return super().forward(input)
        x = _autocast(input)
        if size == (1, 1, 1):
            return _mean(x)
        planes = F.adaptive_avg_pool2d(_planes(x), (size[1], size[2]))
        pooled = F.adaptive_avg_pool2d(_depths(planes, x), (size[0], 1))
        return not_a_view(_volumes(pooled, planes))


class KeepingAdaptiveMaxPool3d(nn.AdaptiveMaxPool3d):
    """torch's AdaptiveMaxPool3d that keeps a channels-last layout; indices are the same numbers.

    Helps: on a CPU torch's kernel copies a channels-last input and returns contiguous activations.
    Hurts: nothing known.
    Source: if the sizes divide evenly, it is max_pool3d, which has a channels-last kernel; otherwise the
    maximum over depth of the maxima over planes.
    """

    def forward(self, input: Tensor) -> Any:  # noqa: A002
        if not _fits(input, 5) or 0 in (size := _sizes(self.output_size, input.shape[2:])):
            return super().forward(input)
        values, indices = _maxima(_autocast(input), size)
        return (values, indices) if self.return_indices else values


class KeepingAdaptiveAvgPool2d(nn.AdaptiveAvgPool2d):
    """torch's AdaptiveAvgPool2d whose gradient keeps a channels-last layout also when pooling to one element.

    Helps: squeeze-and-excitation and classification heads, whose gradient torch makes contiguous.
    Hurts: nothing known. For more elements, torch's kernel keeps the layout, and runs.
    Source: a mean over the rows of a channels-last tensor in memory.
    """

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        if not _fits(input, 4) or _sizes(self.output_size, input.shape[2:]) != (1, 1):
            return super().forward(input)
        return _mean(input)


def _fits(x: Tensor, rank: int) -> bool:
    """Return whether torch's CPU kernels lose the layout of this batch; integers would be rounded twice."""
    on_cpu = x.dim() == rank and x.device.type == "cpu" and x.is_floating_point()
    return on_cpu and x.numel() > 0 and is_channels_last(x)


def _autocast(x: Tensor) -> Tensor:
    """Cast as autocast does for 3-d pooling on a CPU, but not for 2-d pooling."""
    low = x.dtype in (torch.bfloat16, torch.float16)
    return x.float() if low and torch.is_autocast_enabled("cpu") else x


def _average(
    x: Tensor,
    module: nn.AvgPool3d | nn.LPPool3d,
    *,
    padding: Any = 0,
    count: bool = True,
    divisor: int | None = None,
) -> Tensor:
    kernel, stride, ceil = module.kernel_size, module.stride, module.ceil_mode
    k, s, p = _three(kernel), _three(kernel if stride is None else stride), _three(padding)
    # The divisor of a box is the product of the divisors of its sides, also at the borders.
    planes_divisor = None if divisor is None else 1
    planes = F.avg_pool2d(_planes(x), k[1:], s[1:], p[1:], ceil, count, planes_divisor)
    depths = _depths(planes, x)
    pooled = F.avg_pool2d(depths, (k[0], 1), (s[0], 1), (p[0], 0), ceil, count, divisor)
    return _volumes(pooled, planes)


def _mean(x: Tensor) -> Tensor:
    n, c, *spatial = x.shape
    # Over rows, because the gradient of a mean over the last dimensions is contiguous.
    mean = x.movedim(1, -1).flatten(1, -2).mean(1)
    return not_a_view(mean.view(n, *(1 for _ in spatial), c).movedim(-1, 1))


def _maxima(x: Tensor, size: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    if all(old % new == 0 for old, new in zip(x.shape[2:], size, strict=True)):
        kernel = [old // new for old, new in zip(x.shape[2:], size, strict=True)]
        return F.max_pool3d(x, kernel, return_indices=True)
    planes, in_plane = F.adaptive_max_pool2d(_planes(x), size[1:], return_indices=True)
    depths = _depths(planes, x)
    pooled, depth = F.adaptive_max_pool2d(depths, (size[0], 1), return_indices=True)
    in_plane, depth = (each.movedim(1, -1) for each in (_depths(in_plane, x), depth))
    indices = in_plane.gather(1, depth) + depth * (x.shape[3] * x.shape[4])
    both = _volumes(pooled, planes), _volumes(indices.movedim(-1, 1), planes)
    return not_a_view(both[0]), not_a_view(both[1])


def _planes(x: Tensor) -> Tensor:
    """View (N, C, D, H, W) as images (N * D, C, H, W), its order in memory."""
    return x.movedim(1, -1).flatten(0, 1).movedim(-1, 1)


def _depths(planes: Tensor, x: Tensor) -> Tensor:
    """View (N * D, C, h, w) as images (N, h * w * C, D, 1) with height D."""
    rows = planes.movedim(1, -1).reshape(x.shape[0], x.shape[2], 1, -1)
    return rows.movedim(-1, 1)


def _volumes(depths: Tensor, planes: Tensor) -> Tensor:
    """View (N, h * w * C, d, 1) as (N, C, d, h, w)."""
    _, c, h, w = planes.shape
    n, _, d, _ = depths.shape
    return depths.movedim(1, -1).reshape(n, d, h, w, c).movedim(-1, 1)


def _three(value: int | Sequence[int]) -> tuple[int, ...]:
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * 3 if len(values) == 1 else values


def _sizes(output_size: Any, input_size: Sequence[int]) -> tuple[int, ...]:
    """Return the output's size; None, for the whole or one side, is the input's."""
    if not isinstance(output_size, (tuple, list)):  # Dynamo of torch 2.5 traces no `|`
        output_size = [output_size] * len(input_size)
    sizes = zip(output_size, input_size, strict=True)
    return tuple(old if new is None else new for new, old in sizes)


# With fewer channels than one vector register holds, the CPU kernels over the last dimensions are scalar.
_VECTOR_BYTES = 64


class _KeepingSoftmax(nn.Module):
    """Softmax over a permuted view in memory order: over channels, that is the last dimension; no copy.

    Helps: torch's kernel copies a channels-last input, and returns contiguous activations and gradients.
    Hurts: with fewer than 16 channels (32 in half precision) on a CPU that kernel is 10 times slower;
    then the contiguous kernel runs, and its result is copied back, which costs more than it saves if the
    softmax is the last module.
    Source: measured; a softmax over any dimension is the same for a permuted view.
    """

    if TYPE_CHECKING:
        dim: int | None
    _function = staticmethod(F.softmax)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # torch's name
        rank, dim = input.dim(), self.dim
        if dim is None or not is_channels_last(input) or not -rank <= dim < rank:
            return super().forward(input)
        place, channel_bytes = base.memory_dim(dim, rank), input.shape[1] * input.dtype.itemsize
        if input.device.type == "cpu" and channel_bytes < _VECTOR_BYTES and place >= rank - 2:
            return to_channels_last(super().forward(base.with_channels_last_grad(input)))
        rows = self._function(input.movedim(1, -1), place)
        return not_a_view(rows.movedim(-1, 1), is_saved=True)


class KeepingSoftmax(_KeepingSoftmax, nn.Softmax):
    """torch's Softmax that keeps a channels-last layout."""


class KeepingSoftmin(_KeepingSoftmax, nn.Softmin):
    """torch's Softmin that keeps a channels-last layout."""

    _function = staticmethod(F.softmin)


class KeepingLogSoftmax(_KeepingSoftmax, nn.LogSoftmax):
    """torch's LogSoftmax that keeps a channels-last layout."""

    _function = staticmethod(F.log_softmax)


class KeepingSoftmax2d(_KeepingSoftmax, nn.Softmax2d):
    """torch's Softmax2d, over the channels of (N, C, H, W), that keeps a channels-last layout."""

    dim = 1

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        # A 3-d input has its channels first; torch rejects a 5-d input.
        return super().forward(input) if input.dim() == 4 else nn.Softmax2d.forward(self, input)


class _KeepingCircularPad(nn.Module):
    """Circular padding whose result is copied back to channels-last.

    torch writes the parts of the result into a contiguous tensor, in every layout.
    """

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  torch's name
        if not is_channels_last(input):
            return super().forward(input)
        return to_channels_last(super().forward(base.with_channels_last_grad(input)))


class KeepingCircularPad2d(_KeepingCircularPad, nn.CircularPad2d):
    """torch's CircularPad2d that keeps a channels-last layout."""


class KeepingCircularPad3d(_KeepingCircularPad, nn.CircularPad3d):
    """torch's CircularPad3d that keeps a channels-last layout."""


REPAIRS = (
    SwapClass(
        "pooling", KeepingAvgPool3d, KeepingLPPool3d, KeepingAdaptiveAvgPool3d,
        KeepingAdaptiveMaxPool3d, KeepingAdaptiveAvgPool2d,
    ),
    SwapClass("softmax", KeepingSoftmax, KeepingSoftmin, KeepingLogSoftmax, KeepingSoftmax2d),
    SwapClass("circular_pad", KeepingCircularPad2d, KeepingCircularPad3d),
)  # fmt: skip
