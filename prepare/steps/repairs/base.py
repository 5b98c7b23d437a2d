"""The helpers of repairs, which make a module keep the layout of its input.

A repaired module has a class named `Keeping...` (`KeepingGroupNorm`): a subclass of its original class
that keeps a channels-last layout through forward and backward.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from prepare.core.model.memory_format import canonical_stride
from prepare.core.model.module_kinds import is_transformed, rows_copied

FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def is_channels_last(x: Tensor) -> bool:
    """Return whether `x` is in the channels-last format of its rank, and not also in the contiguous format.

    With one channel, or one spatial element, the strides may satisfy both; then the strides of the
    channels and of the last dimension decide.
    """
    if x.dim() not in FORMATS:
        return False
    # Not `is_contiguous`, which `vmap` does not support for these formats.
    last, step, sizes, strides = x.dim() - 1, 1, x.shape, x.stride()
    for dim in (1, *range(last, 1, -1), 0):
        if strides[dim] != step and (sizes[dim] != 1 or dim in (1, last)):
            return False
        step *= sizes[dim]
    return True


def with_exact_strides(x: Tensor) -> Tensor:
    """Return `x` with the canonical channels-last strides of its shape, also for dimensions of size 1.

    torch's kernels look at every stride (pytorch#113437).
    """
    strides = _strides(x.shape)
    if x.stride() == strides:
        return x
    if is_channels_last(x):
        return x.as_strided(x.shape, strides)
    return x.clone(memory_format=FORMATS[x.dim()])


def with_channels_last_grad(x: Tensor) -> Tensor:
    """Return `x` itself; its gradient will have the exact strides of channels-last.

    Compilers and torch.func choose the layout of gradients themselves.
    """
    if torch.compiler.is_compiling() or is_transformed():
        return x
    return _ChannelsLastGrad.apply(x)


def memory_dim(dim: int, rank: int) -> int:
    """Return the position of a dimension of (N, C, *spatial) in memory, in (N, *spatial, C)."""
    dim %= rank
    return dim and (dim - 2) % (rank - 1) + 1


def to_channels_last(x: Tensor) -> Tensor:
    """Return `x` in the channels-last format of its rank; `x` itself if its strides satisfy that."""
    return rows_copied(x) if is_transformed() else x.to(memory_format=FORMATS[x.dim()])


def not_a_view(x: Tensor, *, is_saved: bool = False) -> Tensor:
    """Return `x`, a view of a result that nobody else holds, as a tensor of its own on the same memory.

    Modules of torch return no views, on which `detach_()` raises, and so do changes in place of what was
    computed in `no_grad`. `is_saved` is whether the backward of the result reads it: then a change of the
    returned tensor in place is an error in backward, as in torch.
    """
    is_dual = torch.autograd.forward_ad._current_level >= 0  # `x.data` has no tangent
    if torch.compiler.is_compiling() or is_transformed() or torch.jit.is_tracing() or is_dual:
        return x
    # Not torch's `_unsafe_view`: it changes the strides of dimensions of size 1.
    return _Result.apply(x, is_saved) if x.requires_grad else x.data


class _Result(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, is_saved: bool) -> Tensor:  # noqa: FBT001
        y = x.data
        if is_saved:
            ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        _ = ctx.saved_tensors  # raises if the saved result was changed in place
        return grad, None

    @staticmethod
    def jvp(_: Any, tangent: Tensor, __: None) -> Tensor:
        return tangent.view_as(tangent)


class _ChannelsLastGrad(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_: Any, grad: Tensor) -> Tensor:
        return rows_copied(grad) if is_transformed() else with_exact_strides(grad)

    @staticmethod
    def jvp(_: Any, tangent: Tensor) -> Tensor:
        return tangent.view_as(tangent)


@lru_cache(maxsize=65536)
def _strides(shape: torch.Size) -> tuple[int, ...]:
    return canonical_stride(shape, {4: "channels_last", 5: "channels_last_3d"}[len(shape)])
