"""The repair of circular pads: outputs and gradients keep a channels-last layout."""

from torch import Tensor, nn

from prepare.steps.repairs.base import (
    is_channels_last,
    to_channels_last,
    with_channels_last_grad,
)
from prepare.steps.repairs.swap_class import SwapClass


class _KeepingCircularPad(nn.Module):
    """Circular padding whose result is copied back to channels-last.

    torch writes the parts of the result into a contiguous tensor, in every layout.
    """

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  torch's name
        if not is_channels_last(input):
            return super().forward(input)
        return to_channels_last(super().forward(with_channels_last_grad(input)))


class KeepingCircularPad2d(_KeepingCircularPad, nn.CircularPad2d):
    """torch's CircularPad2d that keeps a channels-last layout."""


class KeepingCircularPad3d(_KeepingCircularPad, nn.CircularPad3d):
    """torch's CircularPad3d that keeps a channels-last layout."""


REPAIR = SwapClass(
    "circular_pad",
    {nn.CircularPad2d: KeepingCircularPad2d, nn.CircularPad3d: KeepingCircularPad3d},
)
