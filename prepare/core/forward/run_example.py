"""Runs the example input through a model, and says what a failure there likely means."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, ValuesView
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from prepare.core.forward.conv_layouts import Call, watch
from prepare.errors import ModelError

if TYPE_CHECKING:
    from types import TracebackType

    from prepare.core.forward.example_input import Example

# What torch says, and what a user can do about it.
_HINTS = {
    r"Input type .* and (bias|weight) type|same dtype|expected scalar type": (
        "the input and the weights differ in precision: the example was formatted as the steps say, "
        "but a tensor that the model makes itself stays as it is, and so does a module that keep names"
    ),
    r"view size is not compatible": (
        "this module calls .view on a tensor that is no longer contiguous: use .reshape or .flatten "
        "there, or exclude the convolutions before it"
    ),
    r"not implemented for '(Half|BFloat16)'": (
        "this device cannot do this in 16 bits: keep the module in float32 with "
        "steps.half.keep=[norms,NAME], or take the other 16-bit precision"
    ),
    r"missing \d+ required|unexpected keyword|takes .* positional": (
        "forward takes other arguments: give them in input.args and input.kwargs"
    ),
    r"to have \d+ channels|Sizes of tensors|must match|[Ss]hapes? .*(cannot be multiplied|invalid)"
    r"|[Ee]xpected .*(input|dimension|size)|Kernel size can't be": (
        "the example input may not fit this model: change input.shape"
    ),
    r"index out of range": "the example input may hold too large integers: change input.high",
}


@dataclass(frozen=True)
class Forward:
    """What went in and what came out, in words, and the calls of the convolutions on the way."""

    given: str
    gave: str
    calls: list[Call]


def run_example(model: nn.Module, example: Example) -> Forward:
    """One forward without gradients, watched; buffers are afterwards what they were.

    Raises:
        ModelError: the forward raised; names the innermost module, and what it likely means.
    """
    given = describe([*example.args, *example.kwargs.values()])
    with watch(model) as calls, _keeping_buffers(model):
        try:
            with torch.no_grad():
                output = model(*example.args, **example.kwargs)
        except Exception as error:
            if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
                raise
            raise explained(model, error) from error
    return Forward(given, describe(output), calls)


@contextmanager
def _keeping_buffers(model: nn.Module) -> Iterator[None]:
    """A forward in training mode counts in the running statistics; that of an example is not to."""
    training = any(module.training for module in model.modules())
    before = [(b, b.detach().clone()) for b in model.buffers()] if training else []
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, values in before:
                buffer.copy_(values)


def arguments(batch: Any) -> tuple[tuple, dict[str, Any]]:
    """How a model is called with it: a tuple holds positional arguments, a mapping named ones."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    if isinstance(batch, tuple | list):
        return tuple(batch), {}
    if hasattr(batch, "args") and hasattr(batch, "kwargs"):  # an Example, or a Call
        return tuple(batch.args), dict(batch.kwargs)
    return (batch,), {}


def describe(value: Any) -> str:
    """The tensors anywhere in `value`, in words: `[2, 1, 32, 32] float32`, several with commas."""
    found = [f"{list(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in tensors_in(value)]
    more = f", and {len(found) - 3} more" if len(found) > 3 else ""
    return ", ".join(found[:3]) + more or type(value).__name__


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors anywhere in `value`: in lists, tuples, mappings and dataclasses."""
    if isinstance(value, Tensor):
        yield value
        return
    if is_dataclass(value) and not isinstance(value, (type, Mapping)):
        value = [getattr(value, field.name, None) for field in fields(value)]
    items = value.values() if isinstance(value, Mapping) else value
    if isinstance(items, list | tuple | ValuesView):
        for item in items:
            yield from tensors_in(item)


def explained(model: nn.Module, error: Exception) -> ModelError:
    """What `model` raised while it ran, as an error that names the innermost module and a likely cause."""
    lines = str(error).strip().split("\n")
    # A compiler's error names its backend first, and what that raised on the next line.
    said = " ".join(lines[: 2 if lines[0].endswith("raised:") else 1])
    hints = (hint for pattern, hint in _HINTS.items() if re.search(pattern, str(error)))
    where = _innermost(model, error.__traceback__)
    wrong = f"{type(error).__name__}: {said}" if said else type(error).__name__
    return ModelError(f"forward of {where}", wrong.rstrip("."), next(hints, ""))


def _innermost(model: nn.Module, trace: TracebackType | None) -> str:
    """The dotted name and class of the module whose code was running."""
    names = {id(module): name for name, module in model.named_modules()}
    found = type(model).__name__
    while trace is not None:
        module = trace.tb_frame.f_locals.get("self")
        if isinstance(module, nn.Module) and names.get(id(module)):
            found = f"{names[id(module)]} ({type(module).__name__})"
        trace = trace.tb_next
    return found
