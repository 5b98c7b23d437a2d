"""Run the example input through a model and explain a failure there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from prepare.core.forward.autocast import autocast, device_of
from prepare.core.forward.conv_layouts import ConvCall, watch
from prepare.core.forward.explain_error import explained
from prepare.core.forward.nested import describe

if TYPE_CHECKING:
    from prepare.core.forward.example_input import Example


@dataclass(frozen=True)
class Forward:
    """The inputs and the output of one forward, in words, and the calls of its convolutions."""

    inputs: str
    output: str
    calls: list[ConvCall]


def run_example(model: nn.Module, example: Example, *, amp: str = "none") -> Forward:
    """Run one forward without gradients, under autocast to `amp`, and record its convolutions.

    The values of buffers are kept.

    Raises:
        ModelError: the forward raised; names the innermost module and the likely cause.
    """
    inputs = describe([*example.args, *example.kwargs.values()])
    with watch(model) as calls, _keeping_buffers(model):
        try:
            with torch.no_grad(), autocast(amp, device_of([model])):
                output = model(*example.args, **example.kwargs)
        except Exception as error:
            if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
                raise
            raise explained(model, error) from error
    return Forward(inputs, describe(output), calls)


@contextmanager
def _keeping_buffers(model: nn.Module) -> Iterator[None]:
    """Restore the values of buffers: a forward in training mode updates the running statistics."""
    training = any(module.training for module in model.modules())
    before = [(b, b.detach().clone()) for b in model.buffers()] if training else []
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, values in before:
                buffer.copy_(values)
