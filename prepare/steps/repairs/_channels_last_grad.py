"""Lays the gradient of an activation out in channels-last, where torch would not."""

from typing import Any

import torch
from torch import Tensor

from prepare.steps.repairs import _norm_kernels


def gradient_laid_out(x: Tensor) -> Tensor:
    """`x` as it is; its gradient will have channels-last's exact strides.

    Compilers and torch.func lay gradients out as they like.
    """
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return x
    return _LaidOut.apply(x)


class _LaidOut(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_: Any, grad: Tensor) -> Tensor:
        return _norm_kernels.exact(grad)

    @staticmethod
    def jvp(_: Any, tangent: Tensor) -> Tensor:
        return tangent.view_as(tangent)
