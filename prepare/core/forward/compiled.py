"""Find out whether a model is compiled, run it without its compiler, and keep what the compiler makes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from prepare.core.utils.files import printable_path
from prepare.core.utils.process_state import PROCESS_STATE
from prepare.errors import FileError

if TYPE_CHECKING:
    from torch import nn

_FOLDER = "TORCHINDUCTOR_CACHE_DIR"


def is_compiled(module: nn.Module) -> bool:
    """Return whether calls of this module itself are compiled."""
    return getattr(module, "_compiled_call_impl", None) is not None or (
        type(module).__name__ == "OptimizedModule"
    )


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
    with PROCESS_STATE, set_stance("force_eager") if set_stance else _calls_removed(model):
        yield


@contextmanager
def compile_cache(folder: str | Path) -> Iterator[None]:
    """Compile into `folder`, and read from it what is there; make the first calls of a model inside.

    Raises:
        FileError: the folder cannot be made.
    """
    path = Path(folder).absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        wrong = f"cannot be made: {error.strerror}"
        raise FileError(printable_path(path), wrong, "choose another folder") from error
    before = os.environ.get(_FOLDER)
    os.environ[_FOLDER] = str(path)
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(_FOLDER, None)
        else:
            os.environ[_FOLDER] = before


@contextmanager
def _calls_removed(model: nn.Module) -> Iterator[None]:
    """Do as `set_stance`, for what `Module.compile` has compiled; the result of `torch.compile` stays."""
    calls = {m: m._compiled_call_impl for m in model.modules() if m._compiled_call_impl}
    for module in calls:
        module._compiled_call_impl = None
    try:
        yield
    finally:
        for module, call in calls.items():
            module._compiled_call_impl = call
