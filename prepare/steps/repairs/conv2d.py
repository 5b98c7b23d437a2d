"""The repair of large 2-d convolutions with few output pixels, on a CPU: a matrix product, no copies."""

from torch import Tensor, nn

from prepare.core.model.issue_sizes import has_large_weight
from prepare.steps.repairs import _conv_as_matmul
from prepare.steps.repairs.base import SwapClass


class KeepingConv2d(nn.Conv2d):
    """torch's Conv2d, but run as one matrix product if the weight is large and there are few output pixels.

    Helps: the last stages of image networks at small batches. torch's kernel reorders the channels-last
    weight in every call, and its gradient once more.
    Hurts: the input is stored for the backward pass once for each kernel position, at most an eighth of
    the size of the weight. Products are summed in another order.
    Source: measured; in a profile of torch's backward, an `aten::copy_` of the weight's shape.
    """

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:  # noqa: A002
        if _conv_as_matmul.applies(self, input, weight):
            return _conv_as_matmul.convolve(self, input, weight, bias)
        return super()._conv_forward(input, weight, bias)


class _LargeConvRepair(SwapClass):
    """Repair only convolutions for which a matrix product may be faster."""

    def fits(self, module: nn.Module) -> bool:
        return super().fits(module) and isinstance(module, nn.Conv2d) and has_large_weight(module)


REPAIR = _LargeConvRepair("conv2d", {nn.Conv2d: KeepingConv2d})
