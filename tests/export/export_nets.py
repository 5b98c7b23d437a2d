"""A small network with what converters get wrong, and a batch for it."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from prepare.stages.export import EXPORTERS


def needs(to):
    """Skip the test unless the packages of the exporter are installed."""
    if missing := EXPORTERS[to]().missing():
        pytest.skip(str(missing))


class Decoder(nn.Module):
    """A small network with what converters get wrong: norms, resizing, concatenation, axes, padding."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.GroupNorm(2, 8)
        self.down = nn.Conv2d(8, 8, 3, stride=2, padding=1)
        self.instance = nn.InstanceNorm2d(8, affine=True)
        self.batch = nn.BatchNorm2d(8)
        self.last = nn.Conv2d(16, 4, 1)
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        skip = torch.relu(self.norm(self.first(x)))
        y = F.leaky_relu(self.batch(self.instance(self.down(skip))), 0.1)
        y = F.interpolate(y, scale_factor=2, mode="bilinear", align_corners=False)
        y = self.last(torch.cat([skip, F.elu(y)], 1))
        y = self.linear(y.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return torch.softmax(y, 1), F.max_pool2d(y, 2)


def network():
    torch.manual_seed(0)
    model = Decoder().eval()
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            tensor.data.add_(0.3 * torch.rand_like(tensor))
    return model


def batch():
    return torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))
