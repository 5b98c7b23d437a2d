"""Runs the example input through a model, and says what a failure there likely means."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from prepare.core.forward.conv_layouts import Call, watch
from prepare.core.forward.explain_error import explained
from prepare.core.forward.nested import describe

if TYPE_CHECKING:
    from prepare.core.forward.example_input import Example


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
