"""A small network that is prepared and guarded, for the tests of a guard."""

import math

import torch
from torch import nn

from prepare.pipeline import Pipeline

ALL = math.inf
STEPS = {
    "conv2d_memory_format": {},
    "repair_layout": {"force": True},
    "input_format": {"attach": True},
}


class Block(nn.Module):
    """Code of its own between its modules, which `keep_layout` rewrites."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(8, 8, 3), nn.InstanceNorm2d(8, affine=True)

    def forward(self, x):
        return torch.cat([self.norm(self.conv(x)).relu(), x[:, :, 1:-1, 1:-1]], 1)


def network():
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Dropout(0.1)]
    return nn.Sequential(*layers, Block(), nn.MaxPool2d(2), nn.Conv2d(16, 4, 1))


def prepared(steps=STEPS, *, training=False):
    pipeline = Pipeline.from_config(steps)
    return pipeline, pipeline.apply(network().train(training), known_issues="ignore")


def images(size=16, samples=2):
    return torch.randn(samples, 3, size, size)


def add(module, value=0.1, size=None):
    """Make a module add a number to its result, for inputs of this size."""
    forward = module.forward
    module.forward = lambda x: forward(x) + value * (size in (None, x.shape[-1]))


def train(model, guard, steps, batch=None):
    for _ in range(steps):
        model(images() if batch is None else batch).square().mean().backward()
        guard()
        model.zero_grad()
