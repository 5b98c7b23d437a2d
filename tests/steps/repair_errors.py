"""The errors of a repaired module and of torch's own, against float64."""

from __future__ import annotations

import copy

import torch
from torch import nn

from prepare.steps.repairs.base import FORMATS
from prepare.steps.repairs.convolutions import backward_exceeds_memory


def laid_out(x):
    return x.detach().to(memory_format=FORMATS[x.dim()])


def results(module, x, dtype):
    """Return the output, and the gradients of the input and of all parameters."""
    module = copy.deepcopy(module).to(dtype)
    x = x.detach().to(dtype).requires_grad_()
    out = module(x)
    # All positive: if a bias gradient cancels to almost nothing, every relative error is large.
    weights = torch.linspace(0.5, 1, out.numel()).view_as(out)
    weights = torch.empty_like(out).copy_(weights)
    return [out, *torch.autograd.grad(out, [x, *module.parameters()], weights)]


def errors(actual, exact):
    return [
        float((a.double() - b).abs().max().detach()) for a, b in zip(actual, exact, strict=True)
    ]


def limits(module, x, dtype, exact):
    """Return four times the largest error of torch's kernels, at least four roundings of the largest number.

    Uses only the roundings if torch's kernel would write outside its memory.
    """
    runs = [(x, exact)]
    if isinstance(
        module, nn.modules.conv._ConvNd
    ):  # also oneDNN's, which torch uses for more than one sample
        twice = laid_out(torch.cat([x, x]))
        runs.append((twice, results(module, twice, torch.float64)))
    if any(backward_exceeds_memory(module, each.to(dtype), right[0]) for each, right in runs):
        runs = []
    try:
        known = [errors(results(module, each, dtype), right) for each, right in runs]
    except RuntimeError:  # torch has no 3-d average pooling for bfloat16
        known = []
    rounding = [torch.finfo(dtype).eps * float(each.detach().abs().max()) for each in exact]
    return [4 * max(of_one) for of_one in zip(*known, rounding, strict=True)]
