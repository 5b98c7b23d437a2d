"""The repair of group norms: on a CPU, torch's kernel is inaccurate for a channels-last input."""

from torch import Tensor, nn

from prepare.core.model.transforms import is_transformed
from prepare.core.model.unsafe_backward import is_unsafe_group_norm
from prepare.steps.repairs import _norm_autograd
from prepare.steps.repairs.base import SwapClass, is_channels_last


class KeepingGroupNorm(nn.GroupNorm):
    """torch's GroupNorm, as accurate over a channels-last batch as over a contiguous one."""

    def forward(self, x: Tensor) -> Tensor:
        if (
            not (is_channels_last(x) and _norm_autograd.supports(x, self.weight))
            or x.shape[1] != self.num_channels
            or x[0, 0].numel() * x.shape[1] == self.num_groups
            or _norm_autograd.autocasts_to_float32(x)
        ):
            # In vmap, torch's own raises for strides that are nearly channels-last.
            copied = is_transformed() or is_unsafe_group_norm(x, self.weight, self.bias)
            return super().forward(_norm_autograd.contiguous_copy(x) if copied else x)
        if _norm_autograd.needs_contiguous_copy(x):
            return _norm_autograd.through_contiguous(super().forward, x)
        return _norm_autograd.normalize(x, self.num_groups, self.weight, self.bias, self.eps)[0]


REPAIR = SwapClass("group_norm", {nn.GroupNorm: KeepingGroupNorm})
