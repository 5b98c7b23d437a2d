"""A small network and short cuts that the tests of the flow share."""

import pytest
import torch
from torch import nn

from flow_nets import channels_last, converted
from prepare.stages.flow import Flow, observe, predict

BOTH = pytest.mark.parametrize("flow_of", [predict, observe])


def cl(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return channels_last(torch.randn(*shape).to(dtype))


class Net(nn.Module):
    """A convolution, the code that a test passes as `inside`, and another convolution."""

    def __init__(self, inside, rank=4, **modules):
        super().__init__()
        conv = nn.Conv2d if rank == 4 else nn.Conv3d
        self.first = conv(4, 4, 3, padding=1)
        for name, module in modules.items():
            self.add_module(name, module)
        self.last = conv(4, 4, 3, padding=1)
        self.inside = inside
        converted(self)

    def forward(self, x):
        return self.last(self.inside(self, self.first(x)))


def breaks(flow: Flow) -> list[tuple[str, str, str]]:
    """Return every break as (module, operation, cause), repeated by its count."""
    return [(e.module, e.operation, e.cause) for e in flow.events for _ in range(e.count)]
