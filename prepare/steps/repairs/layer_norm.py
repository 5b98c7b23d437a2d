"""The repair of layer norms over (C, H, W) and (C, D, H, W): they keep a channels-last input's layout."""

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from prepare.steps.repairs import _norm_autograd, _norm_kernels
from prepare.steps.repairs.base import is_channels_last, to_channels_last
from prepare.steps.repairs.swap_class import SwapClass


class KeepingLayerNorm(nn.LayerNorm):
    """torch's LayerNorm over all dimensions but the batch, keeping a channels-last layout."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # torch's name
        x, weight, bias = input, self.weight, self.bias

        def run_torchs(x: Tensor) -> Tensor:
            return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)

        if (
            not (is_channels_last(x) and _norm_autograd.supports(x, weight))
            or tuple(x.shape[1:]) != self.normalized_shape
            or _norm_autograd.autocasts_to_float32(x)
        ):
            return run_torchs(x)
        if _norm_autograd.needs_contiguous_copy(x):
            return _norm_autograd.through_contiguous(run_torchs, x)
        # In float32, so that a 16-bit result is rounded only once.
        x_wide = x.to(_norm_kernels.compute_dtype(x))
        y, _, _ = _norm_autograd.normalize(x_wide, 1, None, None, self.eps)
        if weight is not None:
            y = y * weight
        if bias is not None:
            y = y + bias
        return to_channels_last(y.to(x.dtype))


class _LayerNormRepair(SwapClass):
    """Repair only norms over (C, H, W) or (C, D, H, W)."""

    def concerns(self, module: nn.Module) -> bool:
        return super().concerns(module) and _rank(module) in (4, 5)

    def ranks(self, module: nn.Module) -> tuple[int, ...]:
        return (_rank(module),)


REPAIR = _LayerNormRepair("layer_norm", {nn.LayerNorm: KeepingLayerNorm})


def _rank(module: Any) -> int:
    return len(module.normalized_shape) + 1
