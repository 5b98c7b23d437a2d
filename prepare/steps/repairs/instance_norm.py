"""The repair of instance norms: they keep a channels-last input's layout, forward and backward."""

from math import prod

import torch
from torch import Tensor, nn

from prepare.steps.repairs import _norm_autograd
from prepare.steps.repairs.base import SwapClass, is_channels_last


class _KeepsLayout:
    """Instance norm over a channels-last batch without the copy that torch makes; else as torch does."""

    def forward(self, x: Tensor) -> Tensor:
        batched = x.dim() == self._get_no_batch_dim() + 1
        of_input = self.training or not self.track_running_stats
        if (
            not (batched and is_channels_last(x) and _norm_autograd.fits(x, self.weight))
            or x.shape[1] != self.num_features
            or (of_input and prod(x.shape[2:]) == 1)
        ):
            return super().forward(x)
        if _norm_autograd.is_odd(x):
            return _norm_autograd.through_contiguous(super().forward, x)
        if not of_input:
            return self._by_running_statistics(x)
        y, mean, var = _norm_autograd.normalise(x, x.shape[1], self.weight, self.bias, self.eps)
        if self.running_mean is not None:
            size = prod(x.shape[2:])
            self._track(self.running_mean, mean)
            self._track(self.running_var, var * (size / (size - 1)))
        return y

    def _by_running_statistics(self, x: Tensor) -> Tensor:
        scale = (self.running_var + self.eps).rsqrt()
        if self.weight is not None:
            scale = scale * self.weight
        shift = -self.running_mean * scale
        if self.bias is not None:
            shift = shift + self.bias
        ones = (1,) * (x.dim() - 2)
        return (x * scale.view(-1, *ones) + shift.view(-1, *ones)).to(x.dtype)

    @torch.no_grad()
    def _track(self, running: Tensor, found: Tensor) -> None:
        momentum = self.momentum or 0.0  # None is 0 here: instance norm keeps no cumulative average
        running.copy_((1 - momentum) * running + momentum * found.view(-1, len(running)).mean(0))


class KeepingInstanceNorm2d(_KeepsLayout, nn.InstanceNorm2d):
    """torch's InstanceNorm2d that keeps a channels-last layout."""


class KeepingInstanceNorm3d(_KeepsLayout, nn.InstanceNorm3d):
    """torch's InstanceNorm3d that keeps a channels-last layout."""


REPAIR = SwapClass(
    "instance_norm",
    {nn.InstanceNorm2d: KeepingInstanceNorm2d, nn.InstanceNorm3d: KeepingInstanceNorm3d},
)
