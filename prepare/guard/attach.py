"""Let a guard see each call of a model: by a hook, or around its compiled call."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import nn

    from prepare.guard.model_guard import ModelGuard

_COMPILED = "_compiled_call_impl"


def attach(guard: ModelGuard, model: nn.Module) -> Callable[[], None]:
    """Call `guard.before`, and `guard.after` if the model is compiled; return what ends that."""
    compiled = vars(model).get(_COMPILED)
    if compiled is None:
        hook = _Looked(guard, model)
        return model.register_forward_pre_hook(hook, with_kwargs=True, prepend=True).remove
    call = _CompiledCall(guard, compiled)  # hooks that are added after the compiler do not run
    vars(model)[_COMPILED] = call

    def detach() -> None:
        if vars(model).get(_COMPILED) is call:
            vars(model)[_COMPILED] = compiled

    return detach


class _Looked:
    """The forward pre-hook of a guarded model; that of a copy does nothing."""

    def __init__(self, guard: ModelGuard | None = None, model: nn.Module | None = None) -> None:
        self._guard, self._model = guard, model

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        guard = self._guard
        if guard is not None and not torch.compiler.is_compiling() and module is self._model:
            guard.before(args, kwargs)

    def __reduce__(self) -> Any:
        return _Looked, ()


class _CompiledCall:
    """The compiled call of a guarded model, with the guard around it."""

    def __init__(self, guard: ModelGuard, compiled: Any) -> None:
        self.compiled = compiled
        self._guard = guard
        vars(self).update(vars(compiled))  # what the step compile keeps there

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._guard.before(args, kwargs)
        try:
            output = self.compiled(*args, **kwargs)
        except BaseException:
            self._guard.after(None, raised=True)
            raise
        return self._guard.after(output, raised=False)
