"""Find out whether a model is compiled, and run it without its compiler."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from prepare.core.utils.process_state import PROCESS_STATE

if TYPE_CHECKING:
    from torch import nn


def is_compiled(module: nn.Module) -> bool:
    """Return whether calls of this module itself are compiled."""
    is_wrapped = type(module).__name__ == "OptimizedModule"
    return is_wrapped or getattr(module, "_compiled_call_impl", None) is not None


def contains_compiled(model: nn.Module) -> bool:
    """Return whether the model, or any module in it, is compiled."""
    return any(is_compiled(module) for module in model.modules())


@contextmanager
def eager_if_compiled(model: nn.Module) -> Iterator[None]:
    """Run compiled modules in `model` eagerly; by torch's promise their outputs have the same strides.

    A compiled module whose tensors are replaced would be compiled again.
    """
    import torch

    if not contains_compiled(model):
        yield
        return
    set_stance = getattr(torch.compiler, "set_stance", None)  # since torch 2.6
    with PROCESS_STATE, set_stance("force_eager") if set_stance else calls_removed(model):
        yield


@contextmanager
def calls_removed(model: nn.Module) -> Iterator[None]:
    """Do as `set_stance`, for what `Module.compile` has compiled; the result of `torch.compile` stays."""
    calls = {m: m._compiled_call_impl for m in model.modules() if m._compiled_call_impl}
    for module in calls:
        module._compiled_call_impl = None
    try:
        yield
    finally:
        for module, call in calls.items():
            module._compiled_call_impl = call
