"""The repair of instance norms: they keep the layout of a channels-last input, forward and backward."""

from math import prod

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.modules.instancenorm import _InstanceNorm

from prepare.steps.repairs import _norm_autograd
from prepare.steps.repairs.base import is_channels_last
from prepare.steps.repairs.swap_class import SwapClass


class _KeepingInstanceNorm(_InstanceNorm):
    """Instance norm without torch's copy of a channels-last batch; other inputs run torch's code."""

    _batched_dim: int

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # torch's name
        # Not by torch's own, which asks `_get_no_batch_dim()`: Dynamo of torch 2.5 fails.
        if input.dim() != self._batched_dim or input.shape[1] != self.num_features:
            return super().forward(input)
        return self._apply_instance_norm(input)

    def _apply_instance_norm(self, input: Tensor) -> Tensor:  # noqa: A002
        x, weight, bias = input, self.weight, self.bias
        uses_input_statistics = self.training or not self.track_running_stats

        def run_torchs(x: Tensor) -> Tensor:
            mean, var = self.running_mean, self.running_var
            momentum = self.momentum or 0.0  # None means 0: instance norm has no cumulative average
            return F.instance_norm(
                x, mean, var, weight, bias, uses_input_statistics, momentum, self.eps
            )

        if (
            not (is_channels_last(x) and _norm_autograd.supports(x, weight))
            or x.shape[1] != self.num_features
            or (uses_input_statistics and prod(x.shape[2:]) == 1)
        ):
            return run_torchs(x)
        if _norm_autograd.needs_contiguous_copy(x):
            return _norm_autograd.through_contiguous(run_torchs, x)
        if not uses_input_statistics:
            return self._normalize_by_running_statistics(x, weight, bias)
        y, mean, var = _norm_autograd.normalize(x, x.shape[1], weight, bias, self.eps)
        if self.running_mean is not None and self.running_var is not None:
            size = prod(x.shape[2:])
            self._track(self.running_mean, mean)
            self._track(self.running_var, var * (size / (size - 1)))
        return y

    def _normalize_by_running_statistics(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        assert self.running_mean is not None
        assert self.running_var is not None
        scale = (self.running_var + self.eps).rsqrt()
        if weight is not None:
            scale = scale * weight
        shift = -self.running_mean * scale
        if bias is not None:
            shift = shift + bias
        ones = (1,) * (x.dim() - 2)
        return (x * scale.view(-1, *ones) + shift.view(-1, *ones)).to(x.dtype)

    @torch.no_grad()
    def _track(self, running: Tensor, current: Tensor) -> None:
        momentum = self.momentum or 0.0
        running.copy_((1 - momentum) * running + momentum * current.view(-1, len(running)).mean(0))


class KeepingInstanceNorm2d(_KeepingInstanceNorm, nn.InstanceNorm2d):
    """torch's InstanceNorm2d that keeps a channels-last layout."""

    _batched_dim = 4


class KeepingInstanceNorm3d(_KeepingInstanceNorm, nn.InstanceNorm3d):
    """torch's InstanceNorm3d that keeps a channels-last layout."""

    _batched_dim = 5


REPAIR = SwapClass(
    "instance_norm",
    {nn.InstanceNorm2d: KeepingInstanceNorm2d, nn.InstanceNorm3d: KeepingInstanceNorm3d},
)
