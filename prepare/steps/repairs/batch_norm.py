"""The repair of batch norms in training on a CPU: as exact in channels-last as in contiguous."""

from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from prepare.core.model.issue_sizes import has_many_rows
from prepare.core.model.transforms import is_transformed
from prepare.steps.repairs import _norm_autograd, _norm_kernels
from prepare.steps.repairs.base import is_channels_last, with_exact_strides
from prepare.steps.repairs.swap_class import SwapClass


class _KeepingBatchNorm(_BatchNorm):
    """Batch norm by the statistics of a large float32 batch, with sums that do not lose digits.

    torch's channels-last kernel adds up all N x H x W numbers of a channel one by one, its contiguous kernel
    each row by itself. A channels-last batch is one long sample in memory, so the kernels of the instance
    norm compute it; all other calls run torch's code.
    """

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  torch's name
        if not self._needs_exact_sums(input):
            return super().forward(input)
        y, mean, var = _NormalizeBatch.apply(
            input, input.shape[1], self.weight, self.bias, self.eps
        )
        if self.training and self.track_running_stats:
            self._track(mean, var, input.numel() // input.shape[1])
        return y

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


class _NormalizeBatch(torch.autograd.Function):
    """Normalization of a channels-last batch as one sample; no view is returned, for in-place activations."""

    @staticmethod
    def forward(  # noqa: PLR0917  # `apply` takes positional arguments only
        ctx: Any, x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        y, mean, var, ctx.far = _norm_autograd.normalize_sample(
            _one_sample(x), groups, weight, bias, eps
        )
        ctx.groups, ctx.eps = groups, eps
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(mean, var)
        ctx.save_for_backward(x, weight, bias, mean, var)
        strides = with_exact_strides(x).stride()
        return y.new_empty(0).set_(y.untyped_storage(), 0, x.shape, strides), mean, var

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Any, ...]:
        if grad is None:
            return (None,) * 5
        x, weight, bias, mean, var = ctx.saved_tensors
        exact = grad if is_transformed() else with_exact_strides(grad)
        d_x, *others = _norm_autograd.sample_gradients(
            ctx, _one_sample(exact), _one_sample(x), weight, bias, mean, var
        )
        if d_x is not None:
            d_x = d_x.movedim(1, -1).reshape(x.movedim(1, -1).shape).movedim(-1, 1)
        return d_x, *others


def _one_sample(x: Tensor) -> Tensor:
    """View a channels-last batch (N, C, ..., H, W) as one sample (1, C, N x ... x H, W)."""
    n, c, *spatial = x.shape
    return x.movedim(1, -1).reshape(1, n * prod(spatial[:-1]), spatial[-1], c).movedim(-1, 1)


class _BatchNormRepair(SwapClass):
    """Repair only norms that hold their weight."""

    def concerns(self, module: nn.Module) -> bool:
        return super().concerns(module) and "weight" in module._parameters


REPAIR = _BatchNormRepair(
    "batch_norm", {nn.BatchNorm2d: KeepingBatchNorm2d, nn.BatchNorm3d: KeepingBatchNorm3d}
)
