"""Normalising over groups of channels in the channels-last layout, as right as torch does it contiguously."""

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from prepare.steps.repairs import _norm_kernels as _kernels
from prepare.steps.repairs._norm_kernels import wide
from prepare.steps.repairs.base import FORMATS

# A mean is far from 0 beyond this many deviations.
_FAR = 4
# Samples of fewer elements, or fewer pixels, are not worth kernels of our own.
_SMALL, _FEW = 1 << 12, 32


def normalise(
    x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`x` (N, C, *spatial), channels-last, normalised over each group of channels of each sample.

    `weight` and `bias` are of shape (C,) or None. Gives the result in the dtype and layout of `x`,
    and the means and the biased variances, each (N * C,), which carry no gradient.
    """
    if _is_watched(x):
        return _plain(x, groups, weight, bias, eps)
    if torch.is_grad_enabled():
        return _Normalise.apply(x, groups, weight, bias, eps)
    return _normalised(x, groups, weight, bias, eps)[:3]


def is_odd(x: Tensor) -> bool:
    """Whether `x` is better copied, normalised by torch's contiguous kernel, and copied back."""
    # What has no data is to show the copies that the same with data makes.
    if _is_watched(x) and not _is_fake(x):
        return False
    rows = prod(x.shape[2:])
    # With one channel strides satisfy both formats; and some pixels cannot be put into rows.
    fits = x.shape[1] > 1 and rows >= _FEW and bool(_kernels.lanes(rows))
    return not fits or x.numel() < _SMALL * len(x)


def through_contiguous(forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """`forward` on a contiguous copy of `x`; its result, and both gradients, with exact strides."""
    contiguous, last = torch.contiguous_format, FORMATS[x.dim()]
    if not torch.is_grad_enabled():  # what a small activation costs is the calls
        return forward(x.clone(memory_format=contiguous)).clone(memory_format=last)
    return _Laid.apply(forward(_Laid.apply(x, contiguous, last)), last, contiguous)


def contiguous_copy(x: Tensor) -> Tensor:
    """A copy of `x`, and of its gradient, with the contiguous format's exact strides."""
    return _Laid.apply(x, torch.contiguous_format, torch.contiguous_format)


def fits(x: Tensor, weight: Tensor | None) -> bool:
    """Whether `x` has elements, and a dtype for which torch's own norms take this `weight`."""
    mixed = x.dtype in (torch.bfloat16, torch.float16)
    dtypes = (x.dtype, torch.float32) if mixed else (x.dtype,)
    return x.numel() > 0 and x.is_floating_point() and (weight is None or weight.dtype in dtypes)


def is_widened(x: Tensor) -> bool:
    """Whether autocast has group and layer norms of `x` run in float32; on a CPU it does not."""
    kind = x.device.type
    return kind not in ("cpu", "meta") and torch.is_autocast_enabled(kind)


class _Normalise(torch.autograd.Function):
    """The backward of the backward goes the plain way. A `setup_context` would cost as much as a kernel."""

    @staticmethod
    def forward(  # noqa: PLR0917  # torch takes them so
        ctx: Any, x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        y, mean, var, ctx.far = _normalised(x, groups, weight, bias, eps)
        ctx.groups, ctx.eps = groups, eps
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(mean, var)
        ctx.save_for_backward(x, weight, bias, mean, var)
        return y, mean, var

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple:
        if grad is None:
            return (None,) * 5
        x, weight, bias, mean, var = ctx.saved_tensors
        if torch.is_grad_enabled():  # gradients of these gradients are wanted
            return _plain_backward(ctx, grad, x, weight, bias)
        x, grad = _kernels.exact(x), _kernels.exact(grad)
        rstd = (var + ctx.eps).rsqrt_()
        if x.dtype.itemsize == 2 and ctx.groups == x.shape[1]:
            dx, d_weight, d_bias = _kernels.gradients(grad, x, mean, rstd, weight)
            if not _is_rough(x, weight):
                dot, d_bias = _kernels.sums(grad, x, mean)
                d_weight = dot * rstd
        else:
            dot, d_bias = _kernels.sums(grad, x, mean)
            d_weight = dot * rstd
            dx = _of_input(ctx, grad, x, weight, (mean, rstd, d_weight, d_bias))
        return dx, None, _of_parameter(d_weight, weight), _of_parameter(d_bias, bias), None


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


def _normalised(
    x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, bool]:
    """As `normalise`, and whether a mean is so far from 0 that it takes digits from what is centred."""
    x, size = _kernels.exact(x), x.shape[1] // groups
    near, var = _kernels.moments(x, rough=_is_rough(x, weight))
    mean, whole = _merged(near, var, size)
    if not _is_far(x, mean, whole):
        return _kernels.normalised(x, mean, whole, weight, bias, eps=eps), mean, whole, False
    centred = x - near.view(x.shape[:2] + (1,) * (x.dim() - 2))
    rest, var = _kernels.moments(_kernels.exact(centred))
    mean, var = _merged(near.double() + rest, var.double(), size)
    scale = (var + eps).rsqrt()
    if weight is not None:
        scale = scale * weight.repeat(len(x))
    shift = torch.zeros_like(mean) if bias is None else bias.repeat(len(x))
    return _affine(x, mean, scale, shift, far=True), mean, var, True


def _is_rough(x: Tensor, weight: Tensor | None) -> bool:
    """Whether all there is to be right is rounded to 16 bits."""
    return x.dtype.itemsize == 2 and (weight is None or weight.dtype == x.dtype)


def _is_far(x: Tensor, mean: Tensor, var: Tensor) -> bool:
    if x.dtype != wide(x):  # float32 has digits enough for 16 bits
        return False
    return torch.addcmul(var, mean, mean, value=-1 / _FAR**2).min().item() < 0


def _of_input(
    ctx: Any, grad: Tensor, x: Tensor, weight: Tensor | None, found: tuple[Tensor, ...]
) -> Tensor:
    mean, rstd, d_weight, d_bias = found
    scale = rstd
    if weight is not None:
        gain = weight.repeat(len(x))
        scale, d_weight, d_bias = scale * gain, d_weight * gain, d_bias * gain
    size = x.shape[1] // ctx.groups
    by = rstd * (-len(x) * x.shape[1] / x.numel())
    of_x, shift = (_group_mean(each, size) * by for each in (d_weight * rstd, d_bias))
    return _affine(x, mean, of_x, shift, grad, scale, far=ctx.far)


def _affine(
    x: Tensor, mean: Tensor, scale: Tensor, shift: Tensor, *more: Tensor, far: bool
) -> Tensor:
    """`(x - mean) * scale + shift (+ more[0] * more[1])`; where a mean is far, it is subtracted first."""
    if not far:
        shift = torch.addcmul(shift, mean, scale, value=-1)
        return _kernels.by_elements(x, None, scale, shift, *more)
    near = mean.to(wide(x))
    return _kernels.by_elements(x, near, scale, shift + (near - mean) * scale, *more)


def _merged(mean: Tensor, var: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The moments of channels made those of the groups of so many that they are in."""
    if size == 1:
        return mean, var
    merged = _group_mean(mean, size)
    return merged, _group_mean(var + (mean - merged).square(), size)


def _group_mean(each: Tensor, size: int) -> Tensor:
    if size == 1:
        return each
    grouped = each.view(-1, size)
    # The kernels take it that every number lies after the one before.
    return grouped.mean(1, keepdim=True).expand_as(grouped).contiguous().view(-1)


def _of_parameter(each: Tensor, parameter: Tensor | None) -> Tensor | None:
    """The gradient of a parameter (C,), from those of each sample (N * C,)."""
    if parameter is None:
        return None
    return each.view(-1, len(parameter)).sum(0).to(parameter.dtype)


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
    mean, var = (each.detach().expand_as(grouped[:, :1]).flatten() for each in (mean, var))
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
