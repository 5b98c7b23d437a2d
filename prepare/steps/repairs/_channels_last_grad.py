"""Give the gradient of an activation channels-last strides, where torch would not."""

from typing import Any

import torch
from torch import Tensor

from prepare.core.model.transforms import is_transformed, rows_copied
from prepare.steps.repairs import _norm_kernels


def with_channels_last_grad(x: Tensor) -> Tensor:
    """Return `x` itself; its gradient will have the exact strides of channels-last.

    Compilers and torch.func choose the layout of gradients themselves.
    """
    if torch.compiler.is_compiling() or is_transformed():
        return x
    return _ChannelsLastGrad.apply(x)


class _ChannelsLastGrad(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_: Any, grad: Tensor) -> Tensor:
        return rows_copied(grad) if is_transformed() else _norm_kernels.with_exact_strides(grad)

    @staticmethod
    def jvp(_: Any, tangent: Tensor) -> Tensor:
        return tangent.view_as(tangent)
