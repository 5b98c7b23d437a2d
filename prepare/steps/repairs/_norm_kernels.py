"""Kernels of normalization on a CPU in the channels-last layout, built from few calls of torch's own kernels.

`torch.native_group_norm` computes a channels-last variance in one pass, which is wrong if the mean is large
against the deviation, and its batch norm adds up all rows one by one, with 100 times the rounding error.
Here a sample is viewed as rows of several pixels each, its lanes, so that torch's own two-pass kernels add up
few rows, and the results of the lanes are merged. All tensors `x` are (N, C, *spatial), channels-last with
the strides of `with_exact_strides`; values for each channel of each sample are (N * C,), in float32 or wider.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from math import isqrt, prod

import torch
from torch import Tensor

from prepare.steps.repairs.base import FORMATS

# The error of summing this many numbers one by one in float32 is below a rounding to 16 bits.
_MAX_SERIAL_SUM = 1 << 14
# Elements per thread at a time: fresh memory, and waking threads, cost more than the arithmetic.
_PIECE_ELEMENTS = 1 << 19


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype to compute in: float32, or float64 for a float64 input."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


@cache
def lane_count(rows: int) -> int:
    """Return how many of `rows` pixels to put into one row: a divisor of `rows`, or 0 if none is suitable.

    The error of a sum in float32 grows with the square root of `rows`, and falls with the number of lanes.
    """
    least = max(1, isqrt(rows) // 2)
    return next((k for k in range(least, 16 * least + 1) if rows % k == 0), 0)


def moments(x: Tensor, *, rough: bool = False) -> tuple[Tensor, Tensor]:
    """Return mean and biased variance of each channel of each sample.

    `rough` allows errors below the rounding to 16 bits.
    """
    n, c, count = _sizes(x)
    many = 1 if rough and count <= _MAX_SERIAL_SUM else lane_count(count)
    # The results have the dtype of the running statistics, which the kernel writes and we discard.
    dtype = compute_dtype(x)
    running = None if x.dtype == dtype else x.new_empty(many * c, dtype=dtype)
    moments_of = torch.batch_norm_update_stats
    results = [moments_of(image, running, running, 0.0) for image in _images(x, many)]
    mean, var = (_concatenated(each) for each in zip(*results, strict=True))
    if many == 1:
        return mean, var
    between, mean = torch.var_mean(mean.view(n, many, c), 1, correction=0)
    return mean.view(-1), between.add_(var.view(n, many, c).mean(1)).view(-1)


def normalize(
    x: Tensor, mean: Tensor, var: Tensor, weight: Tensor | None, bias: Tensor | None, *, eps: float
) -> Tensor:
    """Return `(x - mean) / sqrt(var + eps) * weight + bias`; fast, but inexact if a mean is far from 0."""
    weight, bias = (None if p is None else p.to(compute_dtype(x)) for p in (weight, bias))
    if len(x) == 1:
        return torch.native_batch_norm(x, weight, bias, mean, var, False, 0.0, eps)[0]
    y = torch.empty_like(x, memory_format=FORMATS[x.dim()])
    samples = zip(_images(x), _images(y), mean.chunk(len(x)), var.chunk(len(x)), strict=True)
    for image, out, m, v in samples:
        outs = (out, mean.new_empty(0), mean.new_empty(0))
        torch.native_batch_norm(image, weight, bias, m, v, False, 0.0, eps, out=outs)
    return y


def gradient_sums(grad: Tensor, x: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sums of `grad * (x - mean)` and of `grad`, for each channel of each sample."""
    n, c, count = _sizes(x)
    many = lane_count(count)
    near = mean.to(compute_dtype(x))
    ones = near.new_ones(many * c)
    lane_means = near.view(n, 1, c).expand(n, many, c).contiguous().view(n, -1)
    results = [
        torch.ops.aten.native_batch_norm_backward(
            g, image, ones, None, None, m, ones, True, 0.0, [False, True, True]
        )[1:]
        for g, image, m in zip(_images(grad, many), _images(x, many), lane_means, strict=True)
    ]
    lane_sums = torch.cat([part for parts in zip(*results, strict=True) for part in parts])
    dot, total = lane_sums.view(2 * n, many, c).sum(1, dtype=torch.float64).view(2, n * c).unbind()
    return (dot, total) if near is mean else (dot + total * (near - mean), total)


def gradients(
    grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradient of `x` and the two `gradient_sums`, the first times `rstd`; one channel per group.

    Exact enough for 16 bits, and twice as fast as `gradient_sums` followed by `multiply_add`.
    """
    weight = None if weight is None else weight.to(compute_dtype(x))
    chunks = (each.chunk(len(x)) for each in (mean, rstd))
    results = [
        torch.ops.aten.native_batch_norm_backward(
            g, image, weight, None, None, m, r, True, 0.0, [True, True, True]
        )
        for g, image, m, r in zip(_images(grad), _images(x), *chunks, strict=True)
    ]
    dx, dot, total = (_concatenated(each) for each in zip(*results, strict=True))
    return dx.as_strided(x.shape, x.stride()), dot, total


def multiply_add(
    x: Tensor, mean: Tensor | None, scale: Tensor, shift: Tensor, *more: Tensor
) -> Tensor:
    """Return `(x - mean) * scale + shift (+ more[0] * more[1])`, in the dtype of `x`."""
    n, c, count = _sizes(x)
    many = lane_count(count)  # rows of many pixels make long inner loops
    y = torch.empty_like(
        x, memory_format=FORMATS[x.dim()]
    )  # not a view: it may be changed in place

    def as_rows(tensor: Tensor) -> Tensor:
        size = (n, count // many, many * c)
        return tensor.as_strided(size, (count * c, many * c, 1), tensor.storage_offset())

    factors = [scale, shift, *more[1:], *([] if mean is None else [mean])]
    stacked = torch.stack(factors).to(compute_dtype(x)).view(-1, n, 1, c).expand(-1, n, many, c)
    row_factors = stacked.reshape(-1, n, 1, many * c).unbind()
    rows = (as_rows(x), as_rows(y), *map(as_rows, more[:1]))
    pieces = _pieces(rows, row_factors) if x.numel() > _piece_size() else [(rows, row_factors)]
    for piece, piece_factors in pieces:
        _multiply_add_piece(piece, piece_factors)
    return y


def _multiply_add_piece(tensors: Sequence[Tensor], factors: Sequence[Tensor]) -> None:
    """Compute one piece of `multiply_add`: `tensors` are the same piece of `x`, `y` and `more[0]`."""
    rows, out, *grads = tensors
    scale, shift, *others = factors
    if len(others) > len(grads):
        rows = rows - others[-1]
    same_dtype = out.dtype == scale.dtype
    result = torch.addcmul(shift, rows, scale, out=out if same_dtype else None)
    if grads:
        result.addcmul_(grads[0], others[0])
    if not same_dtype:
        out.copy_(result)


def _sizes(x: Tensor) -> tuple[int, int, int]:
    """Return the number of samples, of channels, and of pixels in each sample."""
    n, c, *spatial = x.shape
    return n, c, prod(spatial)


def _images(x: Tensor, many: int = 1) -> list[Tensor]:
    """Return each sample as an image (1, many * C, pixels / many, 1), channels-last."""
    n, c, count = _sizes(x)
    size, width, start = count * c, many * c, x.storage_offset()
    shape, strides = (1, width, count // many, 1), (size, 1, width, width)
    return [x.as_strided(shape, strides, start + i * size) for i in range(n)]


def _concatenated(tensors: tuple[Tensor, ...]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def _pieces(
    tensors: Sequence[Tensor], factors: Sequence[Tensor]
) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Yield tensors (N, R, L) and factors (N, 1, L) in pieces that fit in a cache."""
    size = _piece_size()
    samples, rows = max(1, size // tensors[0][0].numel()), max(1, size // tensors[0].shape[2])
    for n in range(0, tensors[0].shape[0], samples):
        chosen = slice(n, n + samples)
        for r in range(0, tensors[0].shape[1], rows):
            yield [t[chosen, r : r + rows] for t in tensors], [f[chosen] for f in factors]


def _piece_size() -> int:
    return _PIECE_ELEMENTS * torch.get_num_threads()
