"""Operators that keep a channels-last layout, with the arguments of torch's: `keep_layout` calls them.

For any other input, each calls torch's operator with the same arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from prepare.core.model.transforms import is_transformed
from prepare.steps.repairs.base import FORMATS, memory_dim, to_channels_last


def channels_last_of(x: Any) -> torch.memory_format | None:
    """Return the channels-last format that the order of the dimensions of `x` in memory has, and no other.

    The strides may have gaps (a slice) or be odd in dimensions of size 1 (`x[:, :, -1].unsqueeze(2)`).
    """
    if not isinstance(x, Tensor) or x.layout is not torch.strided or x.dim() not in FORMATS:
        return None
    shape, stride, last = x.shape, x.stride(), x.dim() - 1
    if shape[1] == 1:
        return None
    least, spatial = 0, False
    for dim in (1, *range(last, 1, -1), 0):
        if shape[dim] > 1:
            if stride[dim] < least or stride[dim] == 0:
                return None
            least = stride[dim] * shape[dim]
            spatial = spatial or dim > 1
    return FORMATS[x.dim()] if spatial else None


def canonical(x: Tensor) -> Tensor:
    """Return a view of a channels-last tensor whose dimensions of size 1 have the format's strides.

    torch's kernels read other strides there as contiguous. It copies nothing.
    """
    shape, stride, step = x.shape, x.stride(), 1
    for dim in (1, *range(x.dim() - 1, 1, -1), 0):
        if shape[dim] == 1 and stride[dim] != step:
            break
        step = stride[dim] * shape[dim]
    else:
        return x
    rows = x.movedim(1, -1)
    return rows.view(rows.shape).movedim(-1, 1)


def _in_format(x: Tensor, memory_format: torch.memory_format) -> Tensor:
    """Return `x` in a channels-last format; a copy only if it is in another."""
    if channels_last_of(x) is memory_format:
        return canonical(x)
    return canonical(to_channels_last(x))


def _then_formatted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return torch's function, with the result in the format of its first argument."""

    def keeping(input: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: A002  # torch's names
        memory_format = channels_last_of(input)
        if memory_format is None:
            return function(input, *args, **kwargs)
        return _in_format(function(canonical(input), *args, **kwargs), memory_format)

    return keeping


def _like(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return torch's function, which gives a new tensor the strides of the format of its argument."""

    def keeping(input: Any, **kwargs: Any) -> Any:  # noqa: A002
        memory_format = None if "memory_format" in kwargs else channels_last_of(input)
        if memory_format is None:
            return function(input, **kwargs)
        if is_transformed():
            return function(canonical(input).movedim(1, -1), **kwargs).movedim(-1, 1)
        return function(input, **kwargs, memory_format=memory_format)

    return keeping


interpolate = _then_formatted(F.interpolate)
avg_pool3d = _then_formatted(F.avg_pool3d)
empty_like = _like(torch.empty_like)
zeros_like = _like(torch.zeros_like)
ones_like = _like(torch.ones_like)


def pad(
    input: Any,  # noqa: A002  # torch's names
    pad: Any,
    mode: str = "constant",
    value: float | None = None,
) -> Any:
    """`torch.nn.functional.pad` that keeps channels-last, also if the time has one element."""
    memory_format = channels_last_of(input) or _nearly_channels_last(input)
    if memory_format is None:
        return F.pad(input, pad, mode, value)
    alike = _in_format(input, memory_format)
    return _in_format(F.pad(alike, pad, mode, value), memory_format)


def cat(tensors: Any, dim: Any = 0, *, out: Tensor | None = None) -> Any:
    """`torch.cat` in the format of its largest operand, if that is channels-last."""
    if out is not None:
        return torch.cat(tensors, dim, out=out)
    return torch.cat(_alike(tensors, with_empty=False), dim)


def stack(tensors: Any, dim: Any = 0, *, out: Tensor | None = None) -> Any:
    """`torch.stack` that leaves the channels last in memory."""
    if out is not None or not isinstance(tensors, (list, tuple)):
        return torch.stack(tensors, dim, out=out)
    alike = _alike(tensors)
    rank = alike[0].dim() + 1 if alike else 0
    index = dim + rank if dim < 0 else dim
    if not alike or channels_last_of(alike[0]) is None:
        return torch.stack(tensors, dim)
    rows = [tensor.movedim(1, -1) for tensor in alike]
    # The new dimension moves the channels back if it comes before them.
    return torch.stack(rows, index - (index > 1)).movedim(-1, 1 + (index < 2))


def where(condition: Any, *args: Any, **kwargs: Any) -> Any:
    """`torch.where` in the format of its largest operand, if that is channels-last."""
    if len(args) != 2 or kwargs:
        return torch.where(condition, *args, **kwargs)
    return torch.where(condition, *_alike(args))


def softmax(input: Any, dim: Any = None, *args: Any, **kwargs: Any) -> Any:  # noqa: A002
    """`torch.nn.functional.softmax` over the permuted view in memory order, which copies nothing."""
    if channels_last_of(input) is None or not isinstance(dim, int) or args:
        return F.softmax(input, dim, *args, **kwargs)
    rows = canonical(input).movedim(1, -1)
    return F.softmax(rows, memory_dim(dim, input.dim()), **kwargs).movedim(-1, 1)


def clone(x: Any, *args: Any, **kwargs: Any) -> Any:
    """`Tensor.clone` with the strides of the format."""
    return _formatted(x, "clone", args, kwargs)


def contiguous(x: Any, *args: Any, **kwargs: Any) -> Any:
    """`Tensor.contiguous` in the format that the tensor has; of more dimensions, the tensor itself."""
    if isinstance(x, Tensor) and x.dim() > 5 and not args and not kwargs:
        return x
    return _formatted(x, "contiguous", args, kwargs)


def repeat(x: Any, *sizes: Any) -> Any:
    """`Tensor.repeat` that leaves the channels last in memory."""
    counts = sizes[0] if len(sizes) == 1 and isinstance(sizes[0], (list, tuple)) else sizes
    if channels_last_of(x) is None or len(counts) != x.dim():
        return x.repeat(*sizes)
    rows = canonical(x).movedim(1, -1)
    return rows.repeat(counts[0], *counts[2:], counts[1]).movedim(-1, 1)


def repeat_interleave(x: Any, *args: Any, **kwargs: Any) -> Any:
    """`Tensor.repeat_interleave` of a number of times that leaves the channels last in memory."""
    count: Any = args[0] if args else kwargs.get("repeats")
    dim: Any = args[1] if len(args) > 1 else kwargs.get("dim")
    is_simple = isinstance(count, int) and isinstance(dim, int) and len(args) < 3
    if channels_last_of(x) is None or not is_simple or kwargs.keys() - {"repeats", "dim"}:
        return x.repeat_interleave(*args, **kwargs)
    rows = canonical(x).movedim(1, -1)
    return rows.repeat_interleave(count, memory_dim(dim, x.dim())).movedim(-1, 1)


def view(x: Any, *args: Any, **kwargs: Any) -> Any:
    """`Tensor.view`, or `reshape` for a tensor that is no longer contiguous in memory."""
    is_dtype = kwargs or any(isinstance(arg, torch.dtype) for arg in args)
    if is_dtype or not isinstance(x, Tensor) or x.is_contiguous():
        return x.view(*args, **kwargs)
    return reshape(x, *args)


def reshape(x: Any, *args: Any, **kwargs: Any) -> Any:
    """`Tensor.reshape` that leaves the channels last in memory, if `x` is so permuted.

    Rows of attention (heads, numbers, places) whose numbers lie together in memory have to be copied in any
    case to be an image: into channels-last too.
    """
    sizes = args[0] if len(args) == 1 and isinstance(args[0], (list, tuple)) else args
    if not isinstance(x, Tensor) or kwargs or len(sizes) not in FORMATS or x.numel() == 0:
        return x.reshape(*args, **kwargs)
    known = 1
    for size in sizes:
        known *= 1 if size == -1 else size
    sizes = [x.numel() // known if size == -1 else size for size in sizes]
    first, last = _leading(x, sizes[0]), _leading(x, sizes[0] * sizes[1])
    if first is None or last is None:
        return x.reshape(*args)
    channels, space = range(first, last), range(last, x.dim())
    is_image = len(space) == len(sizes) - 2
    if not _is_slower(x, space, channels) and (is_image or not _is_faster(x, channels, space)):
        return x.reshape(*args)
    rows = x.permute(*range(first), *range(last, x.dim()), *range(first, last))
    moved = rows.reshape(sizes[0], *sizes[2:], sizes[1]).movedim(-1, 1)
    return moved if channels_last_of(moved) is None else canonical(moved)


def sum(x: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: A001  # torch's name
    """`torch.sum` over one dimension that leaves the channels last in memory."""
    dim: Any = args[0] if args else kwargs.get("dim")
    keepdim: Any = args[1] if len(args) > 1 else kwargs.get("keepdim", False)
    is_simple = isinstance(dim, int) and len(args) < 3 and not kwargs.keys() - {"dim", "keepdim"}
    if not isinstance(x, Tensor) or not is_simple or x.dim() - (not keepdim) not in FORMATS:
        return torch.sum(x, *args, **kwargs)
    dim %= x.dim()
    # Without one of the first two dimensions the channels are the third.
    channels = 1 if keepdim or dim > 1 else 2
    space = [each for each in range(channels + 1, x.dim()) if keepdim or each != dim]
    if dim == channels or not _is_slower(x, space, (channels,)):
        return torch.sum(x, *args, **kwargs)
    rows = x.movedim(channels, -1).sum(dim - (dim > channels), keepdim)
    return canonical(rows.movedim(-1, 1))


def flatten(x: Any, start_dim: int = 0, end_dim: int = -1) -> Any:
    """`Tensor.flatten`, as `reshape`."""
    if not isinstance(x, Tensor) or x.dim() == 0:
        return x.flatten(start_dim, end_dim)
    start, end = start_dim % x.dim(), end_dim % x.dim()
    return reshape(x, (*x.shape[:start], -1, *x.shape[end + 1 :]))


def rearrange(tensor: Any, pattern: str, **axes_lengths: Any) -> Any:
    """`einops.rearrange`, as `reshape`."""
    import einops

    left, _, right = pattern.partition("->")
    groups = _groups(right)
    if not isinstance(tensor, Tensor) or "..." in pattern or len(groups) not in FORMATS:
        return einops.rearrange(tensor, pattern, **axes_lengths)
    names = [name for group in groups for name in group]
    x = einops.rearrange(tensor, f"{left} -> {' '.join(names)}", **axes_lengths)
    sizes, dim = [], 0
    for group in groups:
        sizes.append(x.shape[dim : dim + len(group)].numel())
        dim += len(group)
    return reshape(x, sizes)


def add(a: Any, b: Any) -> Any:
    """`a + b`, with the operand first that decides for channels-last."""
    return b + a if _swaps(a, b) else a + b


def mul(a: Any, b: Any) -> Any:
    """`a * b`, with the operand first that decides for channels-last."""
    return b * a if _swaps(a, b) else a * b


def _formatted(x: Any, name: str, args: Any, kwargs: Any) -> Any:
    memory_format = None if args or kwargs else channels_last_of(x)
    if memory_format is None:
        return getattr(x, name)(*args, **kwargs)
    if is_transformed():
        return getattr(canonical(x).movedim(1, -1), name)().movedim(-1, 1)
    return getattr(canonical(x), name)(memory_format=memory_format)


def _alike(tensors: Any, *, with_empty: bool = True) -> Any:
    """Return the tensors in the format of the largest, if that is channels-last; the first one of a tie."""
    if not isinstance(tensors, (list, tuple)):  # Dynamo of torch 2.5 traces no `|`
        return tensors
    rank, size, memory_format = 0, 0, None
    # A loop, because torch.compile does not trace `max` with a key.
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            return tensors
        if tensor.numel() > size or (tensor.numel() == size and memory_format is None):
            rank, size, memory_format = tensor.dim(), tensor.numel(), channels_last_of(tensor)
    if memory_format is None:
        return tensors
    alike = [_in_format(t, memory_format) if t.dim() == rank else t for t in tensors]
    if with_empty:
        return alike
    # To torch an empty tensor is contiguous, whatever its strides, and decides.
    return [t for t in alike if t.numel() or t.dtype != alike[0].dtype] or alike


def _groups(axes: str) -> list[list[str]]:
    """Return the names of the axes of one side of a pattern of einops, for each dimension."""
    groups: list[list[str]] = []
    in_group = False
    for word in axes.replace("(", " ( ").replace(")", " ) ").split():
        if word in "()":
            in_group = word == "("
            if in_group:
                groups.append([])
        elif in_group:
            groups[-1].append(word)
        else:
            groups.append([word])
    return groups


def _leading(x: Tensor, count: int) -> int | None:
    """Return how many of the first dimensions have `count` elements together; None if there are none."""
    product = 1
    for dim, size in enumerate(x.shape):
        if product == count:
            return dim
        product *= size
    return x.dim() if product == count else None


def _nearly_channels_last(x: Any) -> torch.memory_format | None:
    """Return channels-last if the channels of `x` are faster in memory than a spatial dimension."""
    if not isinstance(x, Tensor) or x.layout is not torch.strided or x.dim() not in FORMATS:
        return None
    return FORMATS[x.dim()] if _is_slower(x, range(2, x.dim()), (1,)) else None


def _is_slower(x: Tensor, some: Iterable[int], others: Iterable[int]) -> bool:
    """Return whether one of these dimensions has a larger stride than all others; none may be expanded."""

    def largest(dims: Iterable[int]) -> int:
        found = 0
        for dim in dims:
            if x.shape[dim] > 1 and x.stride(dim) > found:
                found = x.stride(dim)
        return found

    return 0 < largest(others) < largest(some)


def _is_faster(x: Tensor, some: Iterable[int], others: Iterable[int]) -> bool:
    """Return whether one of these dimensions has a smaller stride than all others; none may be expanded."""

    def least(dims: Iterable[int]) -> int:
        found = 0
        for dim in dims:
            if x.shape[dim] > 1 and (found == 0 or x.stride(dim) < found):
                found = x.stride(dim)
        return found

    return 0 < least(some) < least(others)


def _swaps(a: Any, b: Any) -> bool:
    return (
        isinstance(a, Tensor)
        and isinstance(b, Tensor)
        and a.shape == b.shape
        and channels_last_of(a) is None
        and channels_last_of(b) is not None
    )
