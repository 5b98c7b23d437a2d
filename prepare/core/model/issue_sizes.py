"""Name the calls in which a known issue appears at some sizes only; plans and repairs share them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

# Sums of fewer numbers than this lose few digits, and below so many elements a few microseconds count.
_MANY_ROWS, _LARGE_BATCH = 1 << 12, 1 << 17
# Weights with fewer elements than this are cheap to reorder.
_MIN_WEIGHT_ELEMENTS = 1 << 18
# With fewer output channels per output pixel than this, oneDNN's kernels gain more than the reordering costs.
_MIN_CHANNELS_PER_PIXEL = 8
# oneDNN's blocks of input channels, with the widest registers.
CHANNEL_BLOCK = 16


def has_large_weight(module: Any) -> bool:
    """Return whether the weight is so large that a product may be faster, and padding is zeros."""
    size = module.in_channels * module.out_channels * prod(module.kernel_size)
    plain = module.padding_mode == "zeros" and not isinstance(module.padding, str)
    return plain and module.groups == 1 and size >= _MIN_WEIGHT_ELEMENTS


def is_narrow_strided(module: Any) -> bool:
    """Return whether a convolution has kernel 1, a stride, no padding, and few input channels."""
    return (
        all(size == 1 for size in module.kernel_size)
        and any(step > 1 for step in module.stride)
        and module.padding in (0, (0, 0), "valid")
        and module.padding_mode == "zeros"
        and module.groups == 1
        and module.in_channels < CHANNEL_BLOCK
    )


def is_partly_grouped(module: Any) -> bool:
    """Return whether a convolution has groups of several input channels."""
    return 1 < module.groups < module.in_channels


def is_grouped_dilated(module: Any) -> bool:
    """Return whether a convolution in a plane has groups of no whole block, and a dilation of its rows."""
    channels = module.out_channels if module.transposed else module.in_channels
    return (
        module.groups > 1
        and channels // module.groups % CHANNEL_BLOCK > 0
        and module.dilation[-2] > 1
        and prod(module.kernel_size[:-2]) == 1
    )


def is_kernel_stride(module: Any) -> bool:
    """Return whether a convolution runs as such with a kernel that is its stride, as a product can."""
    from prepare.core.model.module_kinds import is_rewritten

    return (
        module.kernel_size == module.stride
        and prod(module.kernel_size) > 1
        and module.padding in (0, (0, 0), (0, 0, 0), "valid")
        and module.groups == 1
        and not is_rewritten(module)
    )


def has_few_pixels(module: Any, shape: Sequence[int]) -> bool:
    """Return whether a large weight meets few output pixels, for an input (N, C, *spatial)."""
    if not has_large_weight(module):
        return False
    sizes = zip(
        *(shape[2:], module.padding, module.dilation, module.kernel_size, module.stride),
        strict=True,
    )
    pixels = shape[0] * prod(
        max(0, (size + 2 * cut - step * (kernel - 1) - 1) // stride + 1)
        for size, cut, step, kernel, stride in sizes
    )
    return 0 < _MIN_CHANNELS_PER_PIXEL * pixels <= module.out_channels


def has_many_rows(module: Any, shape: Sequence[int]) -> bool:  # noqa: ARG001
    """Return whether a sum over all but the channels of (N, C, *spatial) adds up many numbers."""
    size = prod(shape)
    return size >= max(_LARGE_BATCH, _MANY_ROWS * shape[1])


def is_smaller_than_kernel(module: Any, sizes: Sequence[int]) -> bool:
    """Return whether the kernel is larger than the `sizes` over which it moves.

    These are the spatial sizes of the input, or for a transposed convolution of the output.
    """
    extents = zip(sizes, module.kernel_size, module.dilation, strict=True)
    return any(0 < size <= (kernel - 1) * step for size, kernel, step in extents)


def _input_is_smaller_than_kernel(module: Any, shape: Sequence[int]) -> bool | None:
    spatial = shape[-len(module.kernel_size) :]
    return None if module.transposed else is_smaller_than_kernel(module, spatial)


def _is_batch_of_one(module: Any, shape: Sequence[int]) -> bool | None:
    spatial = len(getattr(module, "kernel_size", "ij" + "k" * type(module).__name__.endswith("3d")))
    return len(shape) == spatial + 1 or shape[0] == 1


def _may_be_misread(module: Any, shape: Sequence[int]) -> bool | None:
    # A batch norm misreads one sample only; an instance norm also rows of (H, W, N, C).
    return False if "Batch" in type(module).__name__ and shape[0] != 1 else None


def _may_be_view_of_one(module: Any, shape: Sequence[int]) -> bool | None:
    return None if _is_batch_of_one(module, shape) else False


def _is_unknown(module: Any, shape: Sequence[int]) -> bool | None:  # noqa: ARG001
    return None


def _is_large(module: Any, shape: Sequence[int]) -> bool | None:  # noqa: ARG001
    # The only reported size; the limit is not known.
    return True if prod(shape) >= 16 * 124 * 1282 * 722 else None


def _is_over_2_31(module: Any, shape: Sequence[int]) -> bool | None:
    if prod(shape) >= 2**31:
        return True
    return None if hasattr(module, "scale_factor") else False


@dataclass(frozen=True)
class SizePredicate:
    """A named condition on a call.

    Attributes:
        what: the calls, as a sentence says it after "only".
        holds: takes a module and the shape of its input; returns None if these do not decide.
        in_plan: whether a plan, which knows no shapes, may warn of wrong numbers.
    """

    what: str
    holds: Callable[[Any, Sequence[int]], bool | None]
    in_plan: bool = True


SIZES = {
    "batch_of_one": SizePredicate("at batch 1", _is_batch_of_one),
    "many_rows": SizePredicate("in training, for large batches", has_many_rows, in_plan=False),
    "few_pixels": SizePredicate("where few pixels come out of a large weight", has_few_pixels),
    "smaller_than_kernel": SizePredicate(
        "where the input is smaller than the kernel", _input_is_smaller_than_kernel
    ),
    "large_conv3d": SizePredicate("at large sizes", _is_large),
    "over_2_31": SizePredicate("from 2^31 elements on", _is_over_2_31, in_plan=False),
    "gradient_of_tokens": SizePredicate(
        "where its gradient comes from tokens", _may_be_misread, in_plan=False
    ),
    "view_of_one": SizePredicate(
        "at batch 1, where its input is a view, as of tokens", _may_be_view_of_one, in_plan=False
    ),
    "compiled": SizePredicate("with torch.compile", _is_unknown, in_plan=False),
    "overflow": SizePredicate("after an overflow", _is_unknown, in_plan=False),
    "first_call": SizePredicate("at the first call", _is_unknown, in_plan=False),
    "unknown": SizePredicate("at sizes that are not known", _is_unknown),
}
