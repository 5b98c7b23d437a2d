"""Normalize over groups of channels in the channels-last layout, as accurately as torch does contiguously."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from prepare.core.model.devices import with_threads
from prepare.core.model.module_kinds import is_transformed
from prepare.steps.repairs import _norm_kernels
from prepare.steps.repairs.base import FORMATS, not_a_view, to_channels_last, with_exact_strides

# A mean of more than this many deviations is far from 0.
_FAR_FROM_ZERO = 4
# For samples of fewer elements, or fewer pixels, our kernels are not faster.
_MIN_ELEMENTS, _MIN_PIXELS = 3 << 12, 32
# With fewer elements one thread computes: a norm is about ten parallel regions, and beside other processes
# the threads wait at the end of each for longer than they save.
_LEAST_FOR_THREADS = 1 << 18


def normalize(
    x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalize `x` (N, C, *spatial), channels-last, over each group of channels of each sample.

    `weight` and `bias` are of shape (C,) or None. Return the result in the dtype and layout of `x`,
    and the means and the biased variances, each (N * C,), which have no gradient.
    """
    if is_traced(x):
        return _normalize_differentiably(x, groups, weight, bias, eps)
    if torch.is_grad_enabled():
        return _Normalize.apply(x, groups, weight, bias, eps)
    return normalize_sample(x, groups, weight, bias, eps)[:3]


def needs_contiguous_copy(x: Tensor) -> bool:
    """Return whether to copy `x`, normalize it with torch's contiguous kernel, and copy it back."""
    # A fake tensor shall show the same copies as a tensor with data.
    if is_traced(x) and not _is_fake(x):
        return False
    rows = prod(x.shape[2:])
    # With one channel, the strides satisfy both formats; some numbers of pixels have no suitable divisor.
    suitable = x.shape[1] > 1 and rows >= _MIN_PIXELS and bool(_norm_kernels.lane_count(rows))
    return not suitable or x.numel() < _MIN_ELEMENTS * len(x)


def through_contiguous(forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Run `forward` on a contiguous copy of `x`; the result and both gradients have exact strides."""
    if is_transformed():
        return to_channels_last(forward(contiguous_copy(x)))
    contiguous, channels_last = torch.contiguous_format, FORMATS[x.dim()]
    if not torch.is_grad_enabled():  # for a small activation, the number of calls is the cost
        with _threads_for(x):
            return forward(x.clone(memory_format=contiguous)).clone(memory_format=channels_last)
    y = forward(_CopyInFormats.apply(x, contiguous, channels_last))
    return _CopyInFormats.apply(y, channels_last, contiguous)


def contiguous_copy(x: Tensor) -> Tensor:
    """Copy `x` to the contiguous format; its gradient has exact contiguous strides too."""
    if is_transformed():
        return x.clone(memory_format=torch.contiguous_format)
    return _CopyInFormats.apply(x, torch.contiguous_format, torch.contiguous_format)


def supports(x: Tensor, weight: Tensor | None) -> bool:
    """Return whether `x` has elements, and a dtype for which torch's own norms accept this `weight`."""
    mixed = x.dtype in (torch.bfloat16, torch.float16)
    dtypes = (x.dtype, torch.float32) if mixed else (x.dtype,)
    return x.numel() > 0 and x.is_floating_point() and (weight is None or weight.dtype in dtypes)


def autocasts_to_float32(x: Tensor) -> bool:
    """Return whether autocast runs group and layer norms of `x` in float32; on a CPU it does not."""
    kind = x.device.type
    return kind not in ("cpu", "meta") and torch.is_autocast_enabled(kind)


class _Normalize(torch.autograd.Function):
    """Normalization with a fast backward; its double backward runs differentiable operations.

    No `setup_context`: it would cost as much as a kernel.
    """

    @staticmethod
    def forward(  # noqa: PLR0917  # `apply` takes positional arguments only
        ctx: Any, x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        y, mean, var, ctx.far = normalize_sample(x, groups, weight, bias, eps)
        ctx.groups, ctx.eps = groups, eps
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(mean, var)
        ctx.save_for_backward(x, weight, bias, mean, var)
        return y, mean, var

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Any, ...]:
        if grad is None:
            return (None,) * 5
        return sample_gradients(ctx, grad, *ctx.saved_tensors)


def sample_gradients(  # noqa: PLR0917
    ctx: Any, grad: Tensor, x: Tensor, weight: Any, bias: Any, mean: Tensor, var: Tensor
) -> tuple[Any, ...]:
    """Return the gradients of the arguments of `normalize`; `ctx` has `groups`, `eps` and `far`."""
    # Gradients of these gradients may follow, or `grad` is a batch of gradients.
    if torch.is_grad_enabled() or is_transformed():
        return _differentiable_backward(ctx, grad, x, weight, bias)
    with _threads_for(x):
        return _gradients(ctx, grad, x, weight, bias, mean, var)


def _gradients(  # noqa: PLR0917
    ctx: Any, grad: Tensor, x: Tensor, weight: Any, bias: Any, mean: Tensor, var: Tensor
) -> tuple[Any, ...]:
    x, grad = with_exact_strides(x), with_exact_strides(grad)
    rstd = (var + ctx.eps).rsqrt_()
    if x.dtype.itemsize == 2 and ctx.groups == x.shape[1]:
        dx, d_weight, d_bias = _norm_kernels.gradients(grad, x, mean, rstd, weight)
        if not _rounds_to_16_bits(x, weight):
            dot, d_bias = _norm_kernels.gradient_sums(grad, x, mean)
            d_weight = dot * rstd
    else:
        dot, d_bias = _norm_kernels.gradient_sums(grad, x, mean)
        d_weight = dot * rstd
        dx = _input_gradient(ctx, grad, x, weight, (mean, rstd, d_weight, d_bias))
    return (
        dx,
        None,
        _parameter_gradient(d_weight, weight),
        _parameter_gradient(d_bias, bias),
        None,
    )


def _threads_for(x: Tensor) -> AbstractContextManager[Any]:
    """Return a context with one thread, if `x` is too small for more."""
    return with_threads(1) if x.numel() < _LEAST_FOR_THREADS else nullcontext()


class _CopyInFormats(torch.autograd.Function):
    """Copy a tensor to one format and its gradient to another; at batch 1, kernels misread other strides."""

    @staticmethod
    def forward(x: Tensor, target: torch.memory_format, _: torch.memory_format) -> Tensor:
        return x.clone(memory_format=target)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG004
        _, ctx.target, ctx.grad_target = inputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        if is_transformed():
            return grad, None, None
        return _CopyInFormats.apply(grad, ctx.grad_target, ctx.target), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: Any) -> Tensor:
        return tangent.clone(memory_format=ctx.target)


def normalize_sample(
    x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, bool]:
    """As `normalize`, without autograd; also return whether a mean is far from 0, see `_normalize`."""
    with _threads_for(x):
        return _normalize(x, groups, weight, bias, eps)


def _normalize(
    x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, bool]:
    """As `normalize`; also return whether a mean is so far from 0 that centring `x` loses digits."""
    x, size = with_exact_strides(x), x.shape[1] // groups
    near, channel_var = _norm_kernels.moments(x, rough=_rounds_to_16_bits(x, weight))
    mean, var = _merge_moments(near, channel_var, size)
    if not _has_far_mean(x, mean, var):
        return _norm_kernels.normalize(x, mean, var, weight, bias, eps=eps), mean, var, False
    centred = x - near.view(x.shape[:2] + (1,) * (x.dim() - 2))
    rest, channel_var = _norm_kernels.moments(with_exact_strides(centred))
    mean, var = _merge_moments(near.double() + rest, channel_var.double(), size)
    scale = (var + eps).rsqrt()
    if weight is not None:
        scale = scale * weight.repeat(len(x))
    shift = torch.zeros_like(mean) if bias is None else bias.repeat(len(x))
    return _affine(x, mean, scale, shift, far=True), mean, var, True


def _rounds_to_16_bits(x: Tensor, weight: Tensor | None) -> bool:
    """Return whether the whole result is rounded to 16 bits."""
    return x.dtype.itemsize == 2 and (weight is None or weight.dtype == x.dtype)


def _has_far_mean(x: Tensor, mean: Tensor, var: Tensor) -> bool:
    if x.dtype != _norm_kernels.compute_dtype(x):  # float32 has enough digits for 16 bits
        return False
    return torch.addcmul(var, mean, mean, value=-1 / _FAR_FROM_ZERO**2).min().item() < 0


def _input_gradient(
    ctx: Any, grad: Tensor, x: Tensor, weight: Tensor | None, statistics: tuple[Tensor, ...]
) -> Tensor:
    mean, rstd, d_weight, d_bias = statistics
    scale = rstd
    if weight is not None:
        gain = weight.repeat(len(x))
        scale, d_weight, d_bias = scale * gain, d_weight * gain, d_bias * gain
    size = x.shape[1] // ctx.groups
    factor = rstd * (-len(x) * x.shape[1] / x.numel())
    x_scale, shift = (_group_mean(each, size) * factor for each in (d_weight * rstd, d_bias))
    return _affine(x, mean, x_scale, shift, grad, scale, far=ctx.far)


def _affine(
    x: Tensor, mean: Tensor, scale: Tensor, shift: Tensor, *more: Tensor, far: bool
) -> Tensor:
    """Return `(x - mean) * scale + shift (+ more[0] * more[1])`; with `far`, subtract the mean first."""
    if not far:
        shift = torch.addcmul(shift, mean, scale, value=-1)
        return _norm_kernels.multiply_add(x, None, scale, shift, *more)
    near = mean.to(_norm_kernels.compute_dtype(x))
    return _norm_kernels.multiply_add(x, near, scale, shift + (near - mean) * scale, *more)


def _merge_moments(mean: Tensor, var: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Merge the moments of channels into those of their groups of `size` channels."""
    if size == 1:
        return mean, var
    merged = _group_mean(mean, size)
    return merged, _group_mean(var + (mean - merged).square(), size)


def _group_mean(values: Tensor, size: int) -> Tensor:
    if size == 1:
        return values
    grouped = values.view(-1, size)
    # The kernels require contiguous values.
    return grouped.mean(1, keepdim=True).expand_as(grouped).contiguous().view(-1)


def _parameter_gradient(gradients: Tensor, parameter: Tensor | None) -> Tensor | None:
    """Return the gradient of a parameter (C,), from those of each sample (N * C,)."""
    if parameter is None:
        return None
    return gradients.view(-1, len(parameter)).sum(0).to(parameter.dtype)


def _is_fake(x: Tensor) -> bool:
    return isinstance(x, FakeTensor) and not torch.compiler.is_compiling()


def is_traced(x: Tensor) -> bool:
    """Return whether `x` is traced or transformed, or not on a CPU: then use differentiable operations."""
    return (
        torch.compiler.is_compiling()
        or torch.jit.is_tracing()
        or type(x) not in (Tensor, torch.nn.Parameter)
        or x.device.type != "cpu"
        or is_transformed()
        or torch.autograd.forward_ad._current_level >= 0
    )


def _normalize_differentiably(
    x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """As `normalize`, in differentiable operations: subtract the mean, then average the squares."""
    # As rows, so that the gradient has the exact strides of channels-last at batch 1 too.
    grouped = _rows(x).to(_norm_kernels.compute_dtype(x)).unflatten(2, (groups, -1))
    mean = grouped.mean((1, 3), keepdim=True)
    centred = grouped - mean
    var = centred.square().mean((1, 3), keepdim=True)
    y = (centred * (var + eps).rsqrt()).flatten(2)
    if weight is not None:
        y = y * weight
    if bias is not None:
        y = y + bias
    # Not `grouped[:, :1]`: with a symbolic batch, torch 2.5 adds a guard for the `:`.
    one_row = grouped.narrow(1, 0, 1)
    mean, var = (each.detach().expand_as(one_row).flatten() for each in (mean, var))
    y = _from_rows(y.to(x.dtype), x)
    if torch.compiler.is_compiling():  # compiled code gives a view of batch 1 other strides
        return y.clone(memory_format=FORMATS[x.dim()]), mean, var
    # An in-place activation on a view costs two copies in backward.
    return not_a_view(y), mean, var


def _differentiable_backward(
    ctx: Any, grad: Tensor, x: Tensor, weight: Any, bias: Any
) -> tuple[Any, ...]:
    again = torch.is_grad_enabled()
    if not again:  # the saved tensors, or views of them, are in no graph here
        x = x.detach().requires_grad_()
        weight, bias = (p if p is None else p.detach().requires_grad_() for p in (weight, bias))
    inputs = (x, ctx.groups, weight, bias, ctx.eps)
    needed = [i for i, needs_grad in enumerate(ctx.needs_input_grad) if needs_grad]
    with torch.enable_grad():
        y, _, _ = _normalize_differentiably(*inputs)
    gradients = torch.autograd.grad(y, [inputs[i] for i in needed], grad, create_graph=again)
    by_input = dict(zip(needed, gradients, strict=True))
    return tuple(by_input.get(i) for i in range(len(inputs)))


def _rows(x: Tensor) -> Tensor:
    """View `x` (N, C, *spatial), channels-last, as (N, S, C), its order in memory."""
    return x.movedim(1, -1).flatten(1, -2)


def _from_rows(rows: Tensor, x: Tensor) -> Tensor:
    """View the rows (N, S, C) as a tensor of the shape of `x`, channels-last."""
    return rows.unflatten(1, x.shape[2:]).movedim(-1, 1)
