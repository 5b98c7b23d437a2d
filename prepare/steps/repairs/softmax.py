"""The repair of softmax, softmin and log-softmax: outputs and gradients keep a channels-last layout."""

from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from prepare.steps.repairs.base import (
    is_channels_last,
    memory_dim,
    not_a_view,
    to_channels_last,
    with_channels_last_grad,
)
from prepare.steps.repairs.swap_class import SwapClass

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
        place, channel_bytes = memory_dim(dim, rank), input.shape[1] * input.dtype.itemsize
        if input.device.type == "cpu" and channel_bytes < _VECTOR_BYTES and place >= rank - 2:
            return to_channels_last(super().forward(with_channels_last_grad(input)))
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


REPAIR = SwapClass(
    "softmax",
    {
        nn.Softmax: KeepingSoftmax,
        nn.Softmin: KeepingSoftmin,
        nn.LogSoftmax: KeepingLogSoftmax,
        nn.Softmax2d: KeepingSoftmax2d,
    },
)
