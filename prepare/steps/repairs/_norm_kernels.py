"""What a normalisation computes on a CPU in the channels-last layout, by few calls of torch's own kernels.

`torch.native_group_norm` takes a channels-last variance in one pass (wrong where the mean is large
against the deviation), and its batch norm adds all rows up one by one (100 times the rounding error).
Here a sample is seen as rows of several pixels each, its lanes, so that torch's own two-pass kernels
add up few rows; what each lane found is merged. All tensors `x` are (N, C, *spatial), channels-last
with the strides of `exact`; what belongs to a channel of a sample is (N * C,), in float32 or wider.
"""

from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
from math import isqrt, prod

import torch
from torch import Tensor

from prepare.core.model.memory_format import canonical_stride
from prepare.steps.repairs.base import FORMATS, is_channels_last

# So many numbers summed one by one in float32 are off by less than a rounding to 16 bits.
_FEW = 1 << 14
# Elements for each thread at a time: fresh memory costs more than the arithmetic, waking threads as well.
_PIECE = 1 << 19


def wide(x: Tensor) -> torch.dtype:
    """The dtype to compute in."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


@cache
def lanes(rows: int) -> int:
    """How many pixels to take together, of so many: a divisor of `rows`, or 0 where there is none that fits.

    The error of a sum in float32 grows with the square root of `rows`, and falls with the lanes.
    """
    least = max(1, isqrt(rows) // 2)
    return next((k for k in range(least, 16 * least + 1) if rows % k == 0), 0)


def exact(x: Tensor) -> Tensor:
    """`x` with the strides that channels-last has for its shape, those of dimensions of size 1 as well.

    torch's kernels look at every stride (pytorch#113437).
    """
    strides = _strides(x.shape)
    if x.stride() == strides:
        return x
    if is_channels_last(x):
        return x.as_strided(x.shape, strides)
    return x.clone(memory_format=FORMATS[x.dim()])


def moments(x: Tensor, *, rough: bool = False) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of each channel of each sample; `rough` is enough for 16 bits."""
    n, c, count = _sizes(x)
    many = 1 if rough and count <= _FEW else lanes(count)
    # The kernel gives the dtype of its running statistics, into which it writes what nobody reads.
    running = None if x.dtype == wide(x) else torch.empty(many * c, dtype=wide(x))
    found = [torch.batch_norm_update_stats(i, running, running, 0.0) for i in _images(x, many)]
    mean, var = (_joined(each) for each in zip(*found, strict=True))
    if many == 1:
        return mean, var
    between, mean = torch.var_mean(mean.view(n, many, c), 1, correction=0)
    return mean.view(-1), between.add_(var.view(n, many, c).mean(1)).view(-1)


def normalised(
    x: Tensor, mean: Tensor, var: Tensor, weight: Tensor | None, bias: Tensor | None, *, eps: float
) -> Tensor:
    """`(x - mean) / sqrt(var + eps) * weight + bias`: fast, and inexact if a mean is far from 0."""
    weight, bias = (None if p is None else p.to(wide(x)) for p in (weight, bias))
    if len(x) == 1:
        return torch.native_batch_norm(x, weight, bias, mean, var, False, 0.0, eps)[0]
    y = torch.empty_like(x, memory_format=FORMATS[x.dim()])
    each = zip(_images(x), _images(y), mean.chunk(len(x)), var.chunk(len(x)), strict=True)
    for image, out, m, v in each:
        outs = (out, mean.new_empty(0), mean.new_empty(0))
        torch.native_batch_norm(image, weight, bias, m, v, False, 0.0, eps, out=outs)
    return y


def sums(grad: Tensor, x: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
    """Of each channel of each sample the sums of `grad * (x - mean)`, and of `grad`."""
    n, c, count = _sizes(x)
    many = lanes(count)
    near = mean.to(wide(x))
    one = torch.ones(many * c, dtype=near.dtype)
    middle = near.view(n, 1, c).expand(n, many, c).contiguous().view(n, -1)
    found = [
        torch.ops.aten.native_batch_norm_backward(
            g, i, one, None, None, m, one, True, 0.0, [False, True, True]
        )[1:]
        for g, i, m in zip(_images(grad, many), _images(x, many), middle, strict=True)
    ]
    of_lanes = torch.cat([each for two in zip(*found, strict=True) for each in two])
    dot, total = of_lanes.view(2 * n, many, c).sum(1, dtype=torch.float64).view(2, n * c).unbind()
    return (dot, total) if near is mean else (dot + total * (near - mean), total)


def gradients(
    grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Where each channel is a group the gradient of `x`, and `sums`, the first of them times `rstd`.

    Exact enough for 16 bits, and twice as fast as `sums` and then `by_elements`.
    """
    weight = None if weight is None else weight.to(wide(x))
    chunks = (each.chunk(len(x)) for each in (mean, rstd))
    found = [
        torch.ops.aten.native_batch_norm_backward(
            g, i, weight, None, None, m, r, True, 0.0, [True, True, True]
        )
        for g, i, m, r in zip(_images(grad), _images(x), *chunks, strict=True)
    ]
    dx, dot, total = (_joined(each) for each in zip(*found, strict=True))
    return dx.as_strided(x.shape, x.stride()), dot, total


def by_elements(
    x: Tensor, mean: Tensor | None, scale: Tensor, shift: Tensor, *more: Tensor
) -> Tensor:
    """`(x - mean) * scale + shift (+ more[0] * more[1])`, in the dtype of `x`."""
    n, c, count = _sizes(x)
    many = lanes(count)  # many pixels in a row make long inner loops
    y = torch.empty_like(x, memory_format=FORMATS[x.dim()])  # no view: it may be changed in place

    def long(each: Tensor) -> Tensor:
        size = (n, count // many, many * c)
        return each.as_strided(size, (count * c, many * c, 1), each.storage_offset())

    factors = [scale, shift, *more[1:], *([] if mean is None else [mean])]
    each = torch.stack(factors).to(wide(x)).view(-1, n, 1, c).expand(-1, n, many, c)
    whole = (long(x), long(y), *map(long, more[:1])), each.reshape(-1, n, 1, many * c).unbind()
    for tensors, found in _pieces(*whole) if x.numel() > _piece() else [whole]:
        _add_up(tensors, found)
    return y


def _add_up(tensors: Sequence[Tensor], factors: Sequence[Tensor]) -> None:
    """For `by_elements` the same piece of `x`, of `y` and of `more`."""
    rows, out, *grads = tensors
    scale, shift, *others = factors
    if len(others) > len(grads):
        rows = rows - others[-1]
    exact = out.dtype == scale.dtype
    part = torch.addcmul(shift, rows, scale, out=out if exact else None)
    if grads:
        part.addcmul_(grads[0], others[0])
    if not exact:
        out.copy_(part)


@lru_cache(maxsize=65536)
def _strides(shape: torch.Size) -> tuple[int, ...]:
    return canonical_stride(shape, {4: "channels_last", 5: "channels_last_3d"}[len(shape)])


def _sizes(x: Tensor) -> tuple[int, int, int]:
    """How many samples, channels, and pixels of each sample."""
    n, c, *spatial = x.shape
    return n, c, prod(spatial)


def _images(x: Tensor, many: int = 1) -> list[Tensor]:
    """Each sample as an image (1, many * C, pixels / many, 1), channels-last."""
    n, c, count = _sizes(x)
    size, wide, start = count * c, many * c, x.storage_offset()
    shape, strides = (1, wide, count // many, 1), (size, 1, wide, wide)
    return [x.as_strided(shape, strides, start + i * size) for i in range(n)]


def _joined(each: tuple[Tensor, ...]) -> Tensor:
    return each[0] if len(each) == 1 else torch.cat(each)


def _pieces(tensors: Sequence[Tensor], factors: Sequence[Tensor]) -> Iterator[tuple]:
    """Those of (N, R, L) and of (N, 1, L) in pieces that fit in a cache."""
    size = _piece()
    samples, few = max(1, size // tensors[0][0].numel()), max(1, size // tensors[0].shape[2])
    for n in range(0, tensors[0].shape[0], samples):
        some = slice(n, n + samples)
        for r in range(0, tensors[0].shape[1], few):
            yield [t[some, r : r + few] for t in tensors], [f[some] for f in factors]


def _piece() -> int:
    return _PIECE * torch.get_num_threads()
