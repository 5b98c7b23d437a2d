"""The repair of layer norms over (C, H, W) and (C, D, H, W): they keep a channels-last input's layout."""

from torch import Tensor, nn

from prepare.steps.repairs import _norm_autograd
from prepare.steps.repairs.base import FORMATS, SwapClass, is_channels_last


class KeepingLayerNorm(nn.LayerNorm):
    """torch's LayerNorm over all but the batch, which keeps a channels-last layout."""

    def forward(self, x: Tensor) -> Tensor:
        if (
            not (is_channels_last(x) and _norm_autograd.fits(x, self.weight))
            or tuple(x.shape[1:]) != self.normalized_shape
            or _norm_autograd.is_widened(x)
        ):
            return super().forward(x)
        if _norm_autograd.is_odd(x):
            return _norm_autograd.through_contiguous(super().forward, x)
        # In float32, so that 16 bits are rounded to once.
        y, _, _ = _norm_autograd.normalise(x.to(_norm_autograd.wide(x)), 1, None, None, self.eps)
        if self.weight is not None:
            y = y * self.weight
        if self.bias is not None:
            y = y + self.bias
        return y.to(x.dtype, memory_format=FORMATS[x.dim()])


class _LayerNorms(SwapClass):
    def fits(self, module: nn.Module) -> bool:
        return super().fits(module) and len(module.normalized_shape) in (3, 4)

    def ranks(self, module: nn.Module) -> tuple[int, ...]:
        return (len(module.normalized_shape) + 1,)


REPAIR = _LayerNorms("layer_norm", {nn.LayerNorm: KeepingLayerNorm})
