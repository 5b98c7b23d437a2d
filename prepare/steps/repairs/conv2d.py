"""The repair of large 2-d convolutions that give few pixels, on a CPU: a product instead of copies."""

from torch import Tensor, nn

from prepare.steps.repairs import _conv_as_matmul
from prepare.steps.repairs.base import SwapClass


class KeepingConv2d(nn.Conv2d):
    """torch's Conv2d, but one with a large weight that gives few pixels runs as one matrix product.

    Helps: the last stages of image networks at small batches. torch's own lays the channels-last weight
    out anew in every call, and its gradient once more.
    Hurts: the input is kept for the backward pass once for each place of the kernel; that is at most an
    eighth of the weight. Products are added up in another order.
    Source: measured; in a profile of torch's backward, an `aten::copy_` of the weight's shape.
    """

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:  # noqa: A002
        if _conv_as_matmul.helps(self, input, weight):
            return _conv_as_matmul.product(self, input, weight, bias)
        return super()._conv_forward(input, weight, bias)


class _Large(SwapClass):
    """Repairs only those that it may help."""

    def fits(self, module: nn.Module) -> bool:
        return super().fits(module) and _conv_as_matmul.may_help(module)


REPAIR = _Large("conv2d", {nn.Conv2d: KeepingConv2d})
