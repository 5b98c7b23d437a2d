"""Operators that keep a channels-last layout: `keep_layout` calls them with the arguments of torch's.

Each returns None for what it does not serve, and its parameters are those that it serves: for all other
arguments, tensors of other classes and other objects `otherwise` calls what the code of the model calls.
The functions at the end recognise the tensors that are served, and how these lie in memory.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.fx import Proxy
from torch.nn import functional as F  # noqa: N812

from prepare.core.model.module_kinds import is_transformed, recorded_view
from prepare.steps.repairs.base import FORMATS, memory_dim, not_a_view, to_channels_last

# While a choice is made: what `recording` returns.
_SEEN: ContextVar[set[tuple[Any, str, int]]] = ContextVar("_SEEN")


def otherwise(operator: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a call of `operator` and, where that returns None, of `function` with the same arguments."""

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            found = operator(*args, **kwargs)
        except TypeError:  # it does not have these parameters
            found = None
        if found is None:
            return function(*args, **kwargs)
        if not torch.compiler.is_compiling() and (seen := _SEEN.get(None)) is not None:
            caller = sys._getframe(1)
            if _stride(function, *args, **kwargs) != found.stride():
                seen.add((operator, caller.f_code.co_filename, caller.f_lineno))
        return own(found, (*args, *kwargs.values()))

    return call


@contextmanager
def recording() -> Iterator[set[tuple[Any, str, int]]]:
    """Record the operators that return another layout than torch, and the file and line of each call."""
    token = _SEEN.set(set())
    try:
        yield _SEEN.get()
    finally:
        _SEEN.reset(token)


def _stride(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    try:
        return function(*args, **kwargs).stride()
    except (RuntimeError, ValueError):  # a `view` that torch refuses
        return None


def method(name: str) -> Callable[..., Any]:
    """Return a call of the method `name` of its first argument."""

    def call(receiver: Any, *args: Any, **kwargs: Any) -> Any:
        if name == "view" and isinstance(receiver, Proxy):
            return recorded_view(receiver, *args, **kwargs)
        return getattr(receiver, name)(*args, **kwargs)

    return call


def pad(
    input: Any,  # noqa: A002  # torch's names
    pad: Any,
    mode: str = "constant",
    value: float | None = None,
) -> Any:
    """`torch.nn.functional.pad` that keeps channels-last, also if the time has one element."""
    memory_format = channels_last_of(input) or nearly_channels_last(input)
    if memory_format is None:
        return None
    alike = in_format(input, memory_format)
    return in_format(F.pad(alike, pad, mode, value), memory_format)


def cat(tensors: Any, dim: Any = 0) -> Any:
    """`torch.cat` in the format of its largest operand, if that is channels-last."""
    alike = alike_tensors(tensors)
    if alike is None or not is_dim(dim, alike[0].dim() or 1):
        return None
    return torch.cat(without_empty(alike, dim), dim)


def clone(input: Any) -> Any:  # noqa: A002
    """`torch.clone` with the strides of the format."""
    return _formatted(input, "clone")


def contiguous(input: Any) -> Any:  # noqa: A002
    """`Tensor.contiguous` in the format that the tensor has; of more dimensions, the tensor itself."""
    if is_tensor(input) and input.dim() > 5:
        return input
    return _formatted(input, "contiguous")


def repeat(input: Any, /, *sizes: Any) -> Any:  # noqa: A002
    """`Tensor.repeat` that leaves the channels last in memory."""
    counts = sizes[0] if len(sizes) == 1 and isinstance(sizes[0], (list, tuple)) else sizes
    if channels_last_of(input) is None or len(counts) != input.dim() or not are_sizes(counts):
        return None
    rows = canonical(input).movedim(1, -1)
    return rows.repeat(counts[0], *counts[2:], counts[1]).movedim(-1, 1)


def repeat_interleave(input: Any, repeats: Any, dim: Any) -> Any:  # noqa: A002
    """`torch.repeat_interleave` of a number of times that leaves the channels last in memory."""
    if channels_last_of(input) is None or not is_dim(dim, input.dim()):
        return None
    if not are_sizes((repeats,)):
        return None
    rows = canonical(input).movedim(1, -1)
    return rows.repeat_interleave(repeats, memory_dim(dim, input.dim())).movedim(-1, 1)


def view(input: Any, /, *sizes: Any) -> Any:  # noqa: A002
    """`Tensor.view`, or `reshape` for a tensor that is no longer contiguous in memory."""
    counts = sizes[0] if len(sizes) == 1 and isinstance(sizes[0], (list, tuple)) else sizes
    if not is_tensor(input) or input.is_contiguous() or not counts:
        return None
    if not are_sizes(counts, least=-1):
        return None
    found = reshape(input, counts)
    return input.reshape(counts) if found is None else found


def reshape(input: Any, /, *sizes: Any) -> Any:  # noqa: A002
    """`Tensor.reshape` that leaves the channels last in memory, if the tensor is so permuted.

    Rows of attention (heads, numbers, places) whose numbers lie together in memory have to be copied in any
    case to be an image: into channels-last too.
    """
    counts: Any = sizes[0] if len(sizes) == 1 and isinstance(sizes[0], (list, tuple)) else sizes
    if not is_tensor(input) or len(counts) not in FORMATS or not are_sizes(counts, least=-1):
        return None
    known, unknown = 1, 0
    for size in counts:
        known, unknown = (known, unknown + 1) if size == -1 else (known * size, unknown)
    if known == 0 or unknown > 1 or input.numel() % known or input.numel() == 0:
        return None
    counts = [input.numel() // known if size == -1 else size for size in counts]
    first, last = leading(input, counts[0]), leading(input, counts[0] * counts[1])
    if first is None or last is None:
        return None
    channels, space = range(first, last), range(last, input.dim())
    is_image = len(space) == len(counts) - 2
    if not is_slower(input, space, channels) and (
        is_image or not is_faster(input, channels, space)
    ):
        return None
    rows = input.permute(*range(first), *range(last, input.dim()), *range(first, last))
    moved = rows.reshape(counts[0], *counts[2:], counts[1]).movedim(-1, 1)
    return moved if channels_last_of(moved) is None else canonical(moved)


def flatten(input: Any, start_dim: Any = 0, end_dim: Any = -1) -> Any:  # noqa: A002
    """`torch.flatten`, as `reshape`."""
    if not is_tensor(input):
        return None
    if not is_dim(start_dim, input.dim()) or not is_dim(end_dim, input.dim()):
        return None
    start, end = start_dim % input.dim(), end_dim % input.dim()
    if start >= end:
        return None
    return reshape(input, (*input.shape[:start], -1, *input.shape[end + 1 :]))


def rearrange(tensor: Any, pattern: Any, **axes_lengths: Any) -> Any:
    """`einops.rearrange`, as `reshape`."""
    import einops

    if not is_tensor(tensor) or not isinstance(pattern, str) or "..." in pattern:
        return None
    left, _, right = pattern.partition("->")
    groups = _groups(right)
    if len(groups) not in FORMATS:
        return None
    names = [name for group in groups for name in group]
    x = einops.rearrange(tensor, f"{left} -> {' '.join(names)}", **axes_lengths)
    sizes, dim = [], 0
    for group in groups:
        sizes.append(x.shape[dim : dim + len(group)].numel())
        dim += len(group)
    found = reshape(x, sizes)
    return x.reshape(sizes) if found is None else found


def add(a: Any, b: Any) -> Any:
    """`a + b`, with the operand first that decides for channels-last."""
    if not (is_tensor(a) and is_tensor(b) and a.shape == b.shape):
        return None
    is_second = channels_last_of(a) is None and channels_last_of(b) is not None
    return b + a if is_second else None


def _formatted(x: Any, name: str) -> Any:
    memory_format = channels_last_of(x)
    if memory_format is None:
        return None
    if is_transformed():
        return getattr(canonical(x).movedim(1, -1), name)().movedim(-1, 1)
    return getattr(canonical(x), name)(memory_format=memory_format)


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


# torch's own classes of tensors that are nothing but tensors, and the modules of those of its tracers.
_CLASSES = (Tensor, torch.nn.Parameter)
_TRACERS = ("torch._subclasses.fake_tensor", "torch._subclasses.functional_tensor")


def is_tensor(x: Any) -> bool:
    """Return whether `x` is a tensor with strides, and not of a class that may treat calls in its own way."""
    kind = type(x)
    if kind not in _CLASSES and kind.__module__ not in _TRACERS:
        return False
    return x.layout is torch.strided and not x.is_nested


def is_dim(dim: Any, rank: int) -> bool:
    """Return whether `dim` is the number of a dimension, as torch takes it."""
    return type(dim) is int and -rank <= dim < rank


def are_sizes(sizes: Any, least: int = 0) -> bool:
    """Return whether all are integers, and none is less than `least`."""
    return all(isinstance(s, int) and not isinstance(s, bool) and s >= least for s in sizes)


def channels_last_of(x: Any) -> torch.memory_format | None:
    """Return the channels-last format that the order of the dimensions of `x` in memory has, and no other.

    The strides may have gaps (a slice) or be odd in dimensions of size 1 (`x[:, :, -1].unsqueeze(2)`).
    """
    if not is_tensor(x) or x.dim() not in FORMATS:
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


def in_format(x: Tensor, memory_format: torch.memory_format) -> Tensor:
    """Return `x` in a channels-last format; a copy only if it is in another."""
    if channels_last_of(x) is memory_format:
        return canonical(x)
    return canonical(to_channels_last(x))


def alike_tensors(tensors: Any) -> list[Tensor] | None:
    """Return the tensors in the format of the largest, or of the first one; None without channels-last."""
    if not isinstance(tensors, (list, tuple)):  # Dynamo of torch 2.5 traces no `|`
        return None
    rank, size, memory_format = 0, 0, None
    # A loop, because torch.compile does not trace `max` with a key.
    for tensor in tensors:
        if not is_tensor(tensor):
            return None
        if tensor.numel() > size or (tensor.numel() == size and memory_format is None):
            rank, size, memory_format = tensor.dim(), tensor.numel(), channels_last_of(tensor)
    if memory_format is None:
        return None
    return [in_format(t, memory_format) if t.dim() == rank else t for t in tensors]


def without_empty(tensors: list[Tensor], dim: int) -> list[Tensor]:
    """Return the tensors to join without those that add nothing: to torch they are contiguous, and decide."""
    full = [tensor for tensor in tensors if tensor.numel()]
    if not full or len(full) == len(tensors):
        return tensors
    rest = [(*t.shape[:dim], *t.shape[dim % t.dim() + 1 :]) for t in tensors if t.dim()]
    is_alike = all(
        t.dtype == full[0].dtype and t.device == full[0].device and not t.requires_grad
        for t in tensors
        if not t.numel()
    )
    return full if is_alike and len({*rest}) == 1 else tensors


def leading(x: Tensor, count: int) -> int | None:
    """Return how many of the first dimensions have `count` elements together; None if there are none."""
    product = 1
    for dim, size in enumerate(x.shape):
        if product == count:
            return dim
        product *= size
    return x.dim() if product == count else None


def nearly_channels_last(x: Any) -> torch.memory_format | None:
    """Return channels-last if the channels of `x` are faster in memory than a spatial dimension."""
    if not is_tensor(x) or x.dim() not in FORMATS:
        return None
    return FORMATS[x.dim()] if is_slower(x, range(2, x.dim()), (1,)) else None


def is_slower(x: Tensor, some: Iterable[int], others: Iterable[int]) -> bool:
    """Return whether one of these dimensions has a larger stride than all others; none may be expanded."""
    return 0 < max(_strides(x, others)) < max(_strides(x, some))


def is_faster(x: Tensor, some: Iterable[int], others: Iterable[int]) -> bool:
    """Return whether one of these dimensions has a smaller stride than all others; none may be expanded."""
    return 0 < min(_strides(x, some)) < min(_strides(x, others))


def _strides(x: Tensor, dims: Iterable[int]) -> list[int]:
    return [x.stride(dim) for dim in dims if x.shape[dim] > 1] or [0]


def own(found: Any, arguments: Iterable[Any]) -> Any:
    """Return a result that is no view, as torch's are not, unless it is one of an argument."""
    if torch.compiler.is_compiling() or is_transformed() or not found._is_view():
        return found
    for each in arguments:
        if isinstance(each, Tensor) and found._base is (each._base if each._is_view() else each):
            return found
    return not_a_view(found)
