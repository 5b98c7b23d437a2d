"""The repair of group norms: on a CPU, torch's kernel is inaccurate for a channels-last input."""

from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from prepare.core.model.transforms import is_transformed
from prepare.core.model.unsafe_backward import is_unsafe_group_norm
from prepare.steps.repairs import _norm_autograd
from prepare.steps.repairs.base import is_channels_last
from prepare.steps.repairs.swap_class import SwapClass


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
            copied = is_transformed() or is_unsafe_group_norm(x, weight, bias)
            return run_torchs(_norm_autograd.contiguous_copy(x) if copied else x)
        if _norm_autograd.needs_contiguous_copy(x):
            return _norm_autograd.through_contiguous(run_torchs, x)
        return _norm_autograd.normalize(x, self.num_groups, weight, bias, self.eps)[0]


REPAIR = SwapClass("group_norm", {nn.GroupNorm: KeepingGroupNorm})
