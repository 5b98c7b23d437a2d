"""The repairs of norms: they keep a channels-last layout, as exact as torch's over contiguous inputs."""

from math import prod

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from prepare.core.model.known_issues import has_many_rows
from prepare.core.model.module_kinds import is_transformed
from prepare.core.model.unsafe_backward import is_unsafe_group_norm
from prepare.steps.repairs import _norm_autograd, _norm_kernels
from prepare.steps.repairs.base import (
    SwapClass,
    is_channels_last,
    not_a_view,
    with_channels_last_grad,
)


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


class KeepingGroupNorm(nn.GroupNorm):
    """torch's GroupNorm, as accurate over a channels-last batch as over a contiguous one."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # torch's name
        x, weight, bias = input, self.weight, self.bias

        def run_torchs(x: Tensor) -> Tensor:
            return F.group_norm(x, self.num_groups, weight, bias, self.eps)

        if (
            not (is_channels_last(x) and _norm_autograd.supports(x, weight))
            or x.shape[1] != self.num_channels
            or x[0, 0].numel() * x.shape[1] == self.num_groups
            or _norm_autograd.autocasts_to_float32(x)
        ):
            # In vmap, torch's own raises for strides that are nearly channels-last.
            copied = is_transformed() or is_unsafe_group_norm(x, self.num_groups, weight, bias)
            return run_torchs(_norm_autograd.contiguous_copy(x) if copied else x)
        if _norm_autograd.needs_contiguous_copy(x):
            return _norm_autograd.through_contiguous(run_torchs, x)
        return _norm_autograd.normalize(x, self.num_groups, weight, bias, self.eps)[0]


class _KeepingBatchNorm(_BatchNorm):
    """Batch norm by the statistics of a large float32 batch, with sums that do not lose digits.

    torch's channels-last kernel adds up all N x H x W numbers of a channel one by one, its contiguous kernel
    each row by itself. A channels-last batch is one long sample in memory, so the kernels of the instance
    norm compute it; all other calls run torch's code.
    """

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  torch's name
        if not self._needs_exact_sums(input):
            return super().forward(input)
        rows = _one_sample(with_channels_last_grad(input))
        y, mean, var = _norm_autograd.normalize(
            rows, input.shape[1], self.weight, self.bias, self.eps
        )
        if self.training and self.track_running_stats:
            self._track(mean, var, input.numel() // input.shape[1])
        return not_a_view(y.movedim(1, -1).view(input.movedim(1, -1).shape).movedim(-1, 1))

    def _needs_exact_sums(self, x: Tensor) -> bool:
        return (
            "weight" in self._parameters  # not computed each time that it is read
            and (self.training or (self.running_mean is None and self.running_var is None))
            and x.dtype == torch.float32
            and (self.weight is None or self.weight.dtype == x.dtype)
            and is_channels_last(x)
            and has_many_rows(self, x.shape)
            and x.shape[1] == self.num_features
            and not _norm_autograd.is_traced(x)
            and bool(_norm_kernels.lane_count(x.numel() // x.shape[1]))
        )

    @torch.no_grad()
    def _track(self, mean: Tensor, var: Tensor, rows: int) -> None:
        """Update the running statistics as torch does: by `momentum`, or as a mean of all batches."""
        factor = self.momentum or 0.0
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                factor = 1.0 / float(self.num_batches_tracked)
        if self.running_mean is not None:
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
        if self.running_var is not None:
            unbiased = var * (rows / (rows - 1))
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), factor)


class KeepingBatchNorm2d(_KeepingBatchNorm, nn.BatchNorm2d):
    """torch's BatchNorm2d with exact sums in channels-last."""


class KeepingBatchNorm3d(_KeepingBatchNorm, nn.BatchNorm3d):
    """torch's BatchNorm3d with exact sums in channels-last."""


def _one_sample(x: Tensor) -> Tensor:
    """View a channels-last batch (N, C, ..., H, W) as one sample (1, C, N x ... x H, W)."""
    n, c, *spatial = x.shape
    return x.movedim(1, -1).reshape(1, n * prod(spatial[:-1]), spatial[-1], c).movedim(-1, 1)


class _BatchNormRepair(SwapClass):
    """Repair only norms that hold their weight."""

    def concerns(self, module: nn.Module) -> bool:
        return super().concerns(module) and "weight" in module._parameters


REPAIRS = (
    SwapClass("instance_norm", KeepingInstanceNorm2d, KeepingInstanceNorm3d),
    SwapClass("group_norm", KeepingGroupNorm),
    _BatchNormRepair("batch_norm", KeepingBatchNorm2d, KeepingBatchNorm3d),
)
