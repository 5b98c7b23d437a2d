"""The errors of a repaired module and of torch's own, against float64."""

from __future__ import annotations

import copy

import torch

from prepare.steps.repairs.base import FORMATS
from prepare.steps.repairs.conv3d import backward_exceeds_memory


def laid_out(x):
    return x.detach().to(memory_format=FORMATS[x.dim()])


def results(module, x, dtype):
    """Outputs, and the gradients of the input and of all parameters."""
    module = copy.deepcopy(module).to(dtype)
    x = x.detach().to(dtype).requires_grad_()
    out = module(x)
    # Of one sign: where a bias's gradient cancels to nothing, no error is small against it.
    weights = torch.linspace(0.5, 1, out.numel()).view_as(out)
    weights = torch.empty_like(out).copy_(weights)
    return [out, *torch.autograd.grad(out, [x, *module.parameters()], weights)]


def errors(found, exact):
    return [float((a.double() - b).abs().max().detach()) for a, b in zip(found, exact, strict=True)]


def limits(module, x, dtype, exact):
    """Four times the largest errors of torch's own kernels, and no less than four roundings of the largest number.

    Of the roundings alone where torch's own would write beyond its memory.
    """
    runs = [(x, exact)]
    if hasattr(module, "weight"):  # oneDNN's too, which torch takes for more samples than one
        twice = laid_out(torch.cat([x, x]))
        runs.append((twice, results(module, twice, torch.float64)))
    if any(backward_exceeds_memory(module, each.to(dtype), right[0]) for each, right in runs):
        runs = []
    try:
        known = [errors(results(module, each, dtype), right) for each, right in runs]
    except RuntimeError:  # torch has no average pooling in 3-d for bfloat16
        known = []
    rounding = [torch.finfo(dtype).eps * float(each.detach().abs().max()) for each in exact]
    return [4 * max(of_one) for of_one in zip(*known, rounding, strict=True)]
