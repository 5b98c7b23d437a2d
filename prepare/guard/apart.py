"""Run a comparison in a thread of its own, where no interrupt arrives, and without a trace."""

from __future__ import annotations

import _thread
import contextvars
import os
import threading
from contextlib import nullcontext
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, distributed, fx
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from prepare.core.forward.torch_state import saved_settings
from prepare.core.model.tensors import is_plain
from prepare.stages.verify.execution.module_calls import NotAloneError

if TYPE_CHECKING:
    from collections.abc import Callable

_T = TypeVar("_T")
_MESSAGES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "symm_mem")
# Only threads of a look hold it, which no interrupt reaches: it guards the random numbers of the process.
_ONE_LOOK = threading.Lock()
_PATIENCE = 60.0
_THREAD = threading.local()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_ONE_LOOK._at_fork_reinit)  # type: ignore[attr-defined]


class _NoMessages(TorchDispatchMode):
    """Raises in the place of a collective operation: one process alone must not send messages to others."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in _MESSAGES:
            raise NotAloneError("it communicates with other processes")
        return func(*args, **kwargs or {})


def can_look(tensors: list[Tensor]) -> bool:
    """Return whether a call with these arguments is a plain one, which code of another thread may repeat.

    Not in a backward, where a checkpointed segment runs again, nor while a call is traced, transformed,
    captured in a CUDA graph, or made by a look.
    """
    return not (
        getattr(_THREAD, "looks", False)
        or torch._C._current_graph_task_id() != -1
        or torch._C._functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
        or torch.jit.is_tracing()
        or is_fx_traced()
        or (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())
        or not all(map(is_plain, tensors))
    )


def is_fx_traced() -> bool:
    """Return whether torch.fx traces here; torch's own function for it logs a warning."""
    trace: Any = fx._symbolic_trace
    of_thread = getattr(trace, "_get_is_fx_tracing", None)  # from 2.14 on, in place of the flag
    return of_thread() if of_thread else trace._is_fx_tracing_flag


def apart(run: Callable[[], _T]) -> _T:
    """Return `run()`, called in another thread; wait for its end also after an interrupt.

    So it meets none of the modes, hooks and transforms of this thread, and nothing stops it half-way. It
    sends no messages, one look runs at a time, and random numbers and settings are restored.
    """
    answers: SimpleQueue[Any] = SimpleQueue()
    context, turn = contextvars.copy_context(), [True]
    device = torch.get_default_device()
    stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

    def work() -> None:
        answer: Any
        try:
            turn.pop()
            _THREAD.looks = True
            # No autocast in this thread is the outermost one, whose end clears the casts of all threads.
            torch.autocast_increment_nesting()
            torch.set_autocast_cache_enabled(False)
            with torch.cuda.stream(stream), device if device.type != "cpu" else nullcontext():
                answer = context.run(_without_trace, run), None
        except BaseException as error:  # the module's code may raise anything, as SystemExit
            answer = None, error
        answers.put(answer)
        answers.put(answer)  # the first may get lost in an interrupt

    try:
        # Not a Thread: an interrupt between the lines of its methods breaks it.
        _thread.start_new_thread(work, ())
        found, error = answers.get()
    except BaseException:
        try:
            turn.pop()  # it has not begun, and will not
        except IndexError:
            answers.get()
        raise
    if error is not None:
        raise error if isinstance(error, Exception) else NotAloneError(f"raises {error!r}")
    return found


def _without_trace(run: Callable[[], _T]) -> _T:
    if not _ONE_LOOK.acquire(timeout=_PATIENCE):
        raise TimeoutError("another look does not end")
    restore = saved_settings()
    is_group = distributed.is_available() and distributed.is_initialized()
    try:
        with _NoMessages() if is_group else nullcontext():
            return run()
    finally:
        restore()
        _ONE_LOOK.release()
