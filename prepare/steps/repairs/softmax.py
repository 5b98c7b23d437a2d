"""The repair of softmax and its kin: outputs and gradients keep a channels-last input's layout."""

from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from prepare.steps.repairs._channels_last_grad import gradient_laid_out
from prepare.steps.repairs.base import FORMATS, SwapClass, is_channels_last

# Below one vector register of channels the CPU's kernels over the last dimensions go number by number.
_VECTOR_BYTES = 64


class _KeepsLayout:
    """Softmax over the memory as it lies: over channels that is the last dimension, and nothing is copied.

    Helps: torch's own copies a channels-last input, and gives contiguous activations and gradients.
    Hurts: with fewer than 16 channels (32 in half precision) on a CPU that kernel is 10 times slower; the
    contiguous one runs then, and its result is copied back, which costs more than a last module gains.
    Source: measured; a softmax over any dimension is the same for a permuted view.
    """

    _function = staticmethod(F.softmax)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # torch's name
        rank, dim = input.dim(), self.dim
        if dim is None or not -rank <= dim < rank or not is_channels_last(input):
            return super().forward(input)
        dim %= rank
        place = dim if dim == 0 else (dim - 2) % (rank - 1) + 1  # of `dim` in N, *spatial, C
        channel = input.shape[1] * input.dtype.itemsize
        if input.device.type == "cpu" and channel < _VECTOR_BYTES and place >= rank - 2:
            return super().forward(gradient_laid_out(input)).to(memory_format=FORMATS[rank])
        return self._function(input.movedim(1, -1), place).movedim(-1, 1)


class KeepingSoftmax(_KeepsLayout, nn.Softmax):
    """torch's Softmax that keeps a channels-last layout."""


class KeepingSoftmin(_KeepsLayout, nn.Softmin):
    """torch's Softmin that keeps a channels-last layout."""

    _function = staticmethod(F.softmin)


class KeepingLogSoftmax(_KeepsLayout, nn.LogSoftmax):
    """torch's LogSoftmax that keeps a channels-last layout."""

    _function = staticmethod(F.log_softmax)


class KeepingSoftmax2d(_KeepsLayout, nn.Softmax2d):
    """torch's Softmax2d, over the channels of (N, C, H, W), that keeps a channels-last layout."""

    dim = 1

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        # Of three dimensions the channels are the first; of five it takes none.
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
