"""Steps, models and short cuts that the tests of a verification share."""

import copy
import random

import torch
from torch import nn

from prepare.pipeline import Pipeline
from prepare.stages.verify import verify

FLAT = {"conv2d_memory_format": {}, "input_format": {}}
LAST = {
    "conv2d_memory_format": {},
    "conv3d_memory_format": {},
    "repair_layout": {},
    "input_format": {},
}
PIPELINES = {"float32": LAST, "bfloat16": {**LAST, "half": {"dtype": "bfloat16"}}}


def prepared(reference, steps, **options):
    """Return the pipeline of `steps`, and a copy of the reference that it prepared."""
    pipeline = Pipeline.from_config(steps)
    model = copy.deepcopy(reference)
    pipeline.apply(model, strict=False, known_issues="ignore", **options)
    return pipeline, model


def check(reference, steps, batch, **options):
    """Prepare a copy of the reference, and verify it."""
    pipeline, model = prepared(reference, steps)
    return verify(reference, model, batch, pipeline=pipeline, **options)


def checks_by_kind(result):
    return {check.what: check for check in result.checks}


def flat_norm(act, *, channels=8, affine=True, size=12, double=False):
    """Return a network with an instance norm, whose gradients torch gets wrong at batch 1, and a batch."""
    layers = [nn.Conv2d(3, channels, 3), nn.InstanceNorm2d(channels, affine=affine), act]
    if double:
        layers += [nn.Conv2d(channels, channels, 3), nn.InstanceNorm2d(channels), act]
    return nn.Sequential(*layers, nn.Conv2d(channels, 4, 3)), torch.randn(1, 3, size, size)


def stochastic_depth(x):
    """Drop samples at random, as MONAI's EfficientNet does."""
    drawn = torch.rand((x.shape[0], 1, 1, 1), dtype=x.dtype, device=x.device)
    return x / 0.8 * torch.floor(0.8 + drawn)


# Ways to draw random numbers that a verification makes the same for both models.
FIXED = {
    "rand": stochastic_depth,
    "rand_like": lambda x: x + torch.rand_like(x),
    "randn": lambda x: x + torch.randn(x.shape, dtype=x.dtype),
    "randn_like": lambda x: x + torch.randn_like(x),
    "bernoulli": lambda x: x * torch.bernoulli(torch.full_like(x, 0.5)),
    "bernoulli of a tensor": lambda x: x * torch.sigmoid(x).bernoulli(),
    "bernoulli_": lambda x: x * torch.empty_like(x).bernoulli_(0.5),
    "bernoulli_ of a tensor": lambda x: x * torch.empty_like(x).bernoulli_(torch.sigmoid(x)),
    "a mask": lambda x: x * torch.empty_like(x, dtype=torch.bool).bernoulli_(0.5),
    "uniform_": lambda x: x + torch.empty_like(x).uniform_(-1.0, to=3.0),
    "normal_": lambda x: x + torch.empty_like(x).normal_(mean=1.0, std=0.5),
    "Python": lambda x: x * random.random(),
    "exponential_": lambda x: x - torch.empty_like(x).exponential_(2.0).log(),
}


class Draws(nn.Module):
    """Two convolutions with a function between them that draws random numbers."""

    def __init__(self, draw):
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)
        self.draw = draw

    def forward(self, x):
        return self.last(self.draw(self.first(x)))
