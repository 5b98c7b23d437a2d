"""Normalising over groups of channels in the channels-last layout, as right as torch does it contiguously.

`torch.native_group_norm` takes a channels-last variance in one pass (wrong where the mean is large
against the deviation), and its batch norm adds all rows up one by one (100 times the rounding error).
Here every sample is seen as rows of many pixels each, so that torch's own two-pass kernels add up
few rows; what each lane found is merged in float64.
"""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from prepare.repairs.repair import FORMATS

# Rows are summed one by one, and more lanes leave fewer of them; yet more would leave the cache.
_LANES = 64
# Elements for each thread at a time: fresh memory costs more than the arithmetic, waking threads as well.
_PIECE = 1 << 19
# A mean is far from 0 beyond this many deviations.
_FAR = 4
# For a sample of fewer elements two copies cost less than the calls of many kernels.
_SMALL = 1 << 17


def normalise(
    x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`x` (N, C, *spatial), channels-last, normalised over each group of channels of each sample.

    `weight` and `bias` are of shape (C,) or None. Gives the result in the dtype and layout of `x`,
    and the means and the biased variances, each (N, C), which carry no gradient.
    """
    run = _plain if _is_watched(x) else _Normalise.apply
    return run(x, groups, weight, bias, eps)


def is_small(x: Tensor) -> bool:
    """Whether `x` is better copied, normalised by torch's contiguous kernel, and copied back."""
    samples, channels = x.shape[:2]
    # What has no data is to show the copies that the same with data makes.
    return (not _is_watched(x) or _is_fake(x)) and (
        x.numel() < _SMALL * samples or _lanes(x.numel() // (samples * channels)) < _LANES // 4
    )


def through_contiguous(forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """`forward` on a contiguous copy of `x`; its result, and both gradients, with exact strides."""
    contiguous, last = torch.contiguous_format, FORMATS[x.dim()]
    if not torch.is_grad_enabled():  # what a small activation costs is the calls
        return forward(x.clone(memory_format=contiguous)).clone(memory_format=last)
    return _Laid.apply(forward(_Laid.apply(x, contiguous, last)), last, contiguous)


def fits(x: Tensor, weight: Tensor | None) -> bool:
    """Whether `x` has elements, and a dtype for which torch's own norms take this `weight`."""
    mixed = x.dtype in (torch.bfloat16, torch.float16)
    dtypes = (x.dtype, torch.float32) if mixed else (x.dtype,)
    return x.numel() > 0 and x.is_floating_point() and (weight is None or weight.dtype in dtypes)


def is_widened(x: Tensor) -> bool:
    """Whether autocast has group and layer norms of `x` run in float32; on a CPU it does not."""
    kind = x.device.type
    return kind not in ("cpu", "meta") and torch.is_autocast_enabled(kind)


def wide(x: Tensor) -> torch.dtype:
    """The dtype to compute in."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


class _Normalise(torch.autograd.Function):
    """Three passes over memory forward, four backward; the backward of the backward goes the plain way."""

    @staticmethod
    def forward(
        x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows = _rows(x)
        mean, var = _merged(*_moments(rows), groups)
        scale = (var + eps).rsqrt()
        if weight is not None:
            scale = scale * weight
        shift = torch.zeros_like(mean) if bias is None else bias.expand_as(mean)
        by = _by_elements if _is_far(rows, mean, var) else _by_kernel
        # No view: an activation that works in place may follow.
        y = torch.empty_like(x, memory_format=FORMATS[x.dim()])
        by(rows, mean, scale, shift, _rows(y))
        return y, mean, var

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        x, ctx.groups, weight, bias, ctx.eps = inputs
        _, mean, var = output
        ctx.mark_non_differentiable(mean, var)
        ctx.save_for_backward(x, weight, bias, mean, var)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple:
        x, weight, bias, mean, var = ctx.saved_tensors
        if torch.is_grad_enabled():  # gradients of these gradients are wanted
            return _plain_backward(ctx, grad, x, weight, bias)
        rows, grads = _rows(x), _rows(grad).contiguous()
        total, dot = _sums(grads, rows, mean)
        rstd = (var + ctx.eps).rsqrt()
        gain = torch.ones_like(rstd) if weight is None else weight.expand_as(rstd)
        of_x = -_group_mean(gain * dot, ctx.groups) / rows.shape[1] * rstd**3
        shift = -_group_mean(gain * total, ctx.groups) / rows.shape[1] * rstd
        dx = torch.empty_like(grads)
        _by_elements(rows, mean, of_x, shift, dx, grads, gain * rstd)
        d_weight = None if weight is None else (dot * rstd).sum(0).to(weight.dtype)
        d_bias = None if bias is None else total.sum(0).to(bias.dtype)
        return _like(dx, x), None, d_weight, d_bias, None


class _Laid(torch.autograd.Function):
    """A copy in one format, and of its gradient in another: at batch 1 kernels misread other strides."""

    @staticmethod
    def forward(x: Tensor, there: torch.memory_format, _: torch.memory_format) -> Tensor:
        return x.clone(memory_format=there)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:  # noqa: ARG004
        _, ctx.there, ctx.back = inputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        return _Laid.apply(grad, ctx.back, ctx.there), None, None


def _is_fake(x: Tensor) -> bool:
    return isinstance(x, FakeTensor) and not torch.compiler.is_compiling()


def _is_watched(x: Tensor) -> bool:
    """Whether something traces or transforms `x`, or this is no CPU: then plain operations serve best."""
    return (
        torch.compiler.is_compiling()
        or torch.jit.is_tracing()
        or type(x) not in (Tensor, torch.nn.Parameter)
        or x.device.type != "cpu"
        or torch._C._are_functorch_transforms_active()
        or torch.autograd.forward_ad._current_level >= 0
    )


def _plain(
    x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The same in differentiable operations: the mean is subtracted, then squares are averaged."""
    # Rows, because their gradient then has the exact strides of channels-last at batch 1 as well.
    grouped = _rows(x).to(wide(x)).unflatten(2, (groups, -1))
    mean = grouped.mean((1, 3), keepdim=True)
    centred = grouped - mean
    var = centred.square().mean((1, 3), keepdim=True)
    y = (centred * (var + eps).rsqrt()).flatten(2)
    if weight is not None:
        y = y * weight
    if bias is not None:
        y = y + bias
    mean, var = (each.detach().expand_as(grouped[:, :1]).flatten(1) for each in (mean, var))
    y = _like(y.to(x.dtype), x)
    transformed = torch._C._are_functorch_transforms_active()
    if torch.compiler.is_compiling() or (torch.is_grad_enabled() and not transformed):
        # No view: compiled code gives one of batch 1 other strides than it has here, and an activation
        # that works in place on one costs two copies in backward.
        y = y.clone(memory_format=FORMATS[x.dim()])
    return y, mean, var


def _plain_backward(ctx: Any, grad: Tensor, x: Tensor, weight: Any, bias: Any) -> tuple:
    given = (x, ctx.groups, weight, bias, ctx.eps)
    wanted = [i for i, needed in enumerate(ctx.needs_input_grad) if needed]
    y, _, _ = _plain(*given)
    found = torch.autograd.grad(y, [given[i] for i in wanted], grad, create_graph=True)
    by_input = dict(zip(wanted, found, strict=True))
    return tuple(by_input.get(i) for i in range(len(given)))


def _rows(x: Tensor) -> Tensor:
    """`x` (N, C, *spatial), channels-last, as the (N, S, C) that it is in memory."""
    return x.movedim(1, -1).flatten(1, -2)


def _like(rows: Tensor, x: Tensor) -> Tensor:
    """The rows (N, S, C) as a tensor of the shape of `x`, channels-last."""
    return rows.unflatten(1, x.shape[2:]).movedim(-1, 1)


def _moments(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance over the rows, (N, S, C) to (N, C), in float64."""
    mean, var = _moments_in_lanes(rows)
    if _is_far(rows, mean, var):
        near = mean.to(rows.dtype)
        rest, var = _moments_in_lanes(rows - near.unsqueeze(1))
        mean = near + rest
    return mean, var


def _moments_in_lanes(rows: Tensor) -> tuple[Tensor, Tensor]:
    lanes = _lanes(rows.shape[1])
    zeros = torch.zeros(lanes * rows.shape[2], dtype=wide(rows))
    found = [
        torch.batch_norm_update_stats(_image(each, lanes), zeros, zeros.clone(), 0.0)
        for each in rows
    ]
    means, variances = zip(*found, strict=True)
    mean, var = (torch.stack(f).double().unflatten(1, (lanes, -1)) for f in (means, variances))
    merged = mean.mean(1, keepdim=True)
    return merged.squeeze(1), (var + (mean - merged).square()).mean(1)


def _sums(grads: Tensor, rows: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
    """Sums over the rows, (N, S, C) to (N, C): of `grads`, and of `grads` times `rows - mean`."""
    lanes = _lanes(rows.shape[1])
    near = mean.to(wide(rows))
    one = torch.ones(lanes * rows.shape[2], dtype=near.dtype)
    each = [
        torch.ops.aten.native_batch_norm_backward(
            _image(grad, lanes), _image(sample, lanes), one, None, None, middle.repeat(lanes), one,
            True, 0.0, [False, True, True],
        )[1:]
        for grad, sample, middle in zip(grads, rows, near, strict=True)
    ]  # fmt: skip
    dots, totals = zip(*each, strict=True)
    dot, total = (torch.stack(f).double().unflatten(1, (lanes, -1)).sum(1) for f in (dots, totals))
    return total, dot + total * (near - mean)  # the kernel takes the mean in the width of `rows`


def _merged(mean: Tensor, var: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """The moments (N, C) of channels made those of the groups that they are in."""
    merged = _group_mean(mean, groups)
    return merged, _group_mean(var + (mean - merged).square(), groups)


def _group_mean(x: Tensor, groups: int) -> Tensor:
    grouped = x.unflatten(1, (groups, -1))
    return grouped.mean(2, keepdim=True).expand_as(grouped).flatten(1)


def _by_kernel(rows: Tensor, mean: Tensor, scale: Tensor, shift: Tensor, out: Tensor) -> None:
    """`(rows - mean) * scale + shift`, (N, S, C) and (N, C): fast, and inexact if the mean is far from 0."""
    mean, scale, shift = (each.to(wide(rows)) for each in (mean, scale, shift))
    one, none = torch.ones_like(mean[0]), mean.new_empty(0)
    for x, m, a, b, y in zip(rows, mean, scale, shift, out, strict=True):
        outs = (_image(y), none, none.clone())
        torch.native_batch_norm(_image(x), a, b, m, one, False, 0.0, 0.0, out=outs)


def _by_elements(
    rows: Tensor, mean: Tensor, scale: Tensor, shift: Tensor, out: Tensor, *more: Tensor
) -> None:
    """`out = (rows - mean) * scale + shift (+ more[0] * more[1])`, in the dtype of `rows`."""
    lanes = _lanes(rows.shape[1])  # many pixels in a row make long inner loops

    def long(each: Tensor) -> Tensor:
        return each.unflatten(1, (-1, lanes)).flatten(2)

    def repeated(each: Tensor) -> Tensor:
        return each.to(wide(rows)).repeat(1, lanes).unsqueeze(1)

    near = mean.to(wide(rows))
    shift = shift + (near - mean) * scale
    x, m, a, b = long(rows), repeated(near), repeated(scale), repeated(shift)
    g, c = (long(more[0]), repeated(more[1])) if more else (None, None)
    out = long(out)
    for at, n in _pieces(x):
        part = x[at] - m[n]
        torch.addcmul(b[n], part, a[n], out=part)
        if more:
            part.addcmul_(g[at], c[n])
        out[at] = part


def _pieces(x: Tensor) -> Iterator[tuple[tuple[slice, slice], slice]]:
    """Slices of `x` over its first two dimensions, and over the first alone, that fit in a cache."""
    size = _PIECE * torch.get_num_threads()
    samples, rows = max(1, size // x[0].numel()), max(1, size // x.shape[2])
    for n in range(0, x.shape[0], samples):
        some = slice(n, n + samples)
        for r in range(0, x.shape[1], rows):
            yield (some, slice(r, r + rows)), some


def _image(rows: Tensor, lanes: int = 1) -> Tensor:
    """One sample (S, C) as an image (1, lanes * C, S / lanes, 1), with the exact channels-last strides.

    The kernels look at every stride, those of dimensions of size 1 as well (pytorch#113437).
    """
    c = rows.shape[1] * lanes
    return rows.as_strided((1, c, rows.numel() // c, 1), (rows.numel(), 1, c, c))


@cache
def _lanes(rows: int) -> int:
    """The smallest divisor of `rows` that is `_LANES` or more, or else the largest there is."""
    divisors = [k for k in range(1, min(rows, 16 * _LANES) + 1) if rows % k == 0]
    return next((k for k in divisors if k >= _LANES), divisors[-1])


def _is_far(rows: Tensor, mean: Tensor, var: Tensor) -> bool:
    """Whether a mean is so far from 0 that it takes digits which `rows` have from what is centred."""
    return rows.dtype == wide(rows) and bool((mean.square() > _FAR**2 * var).any())
