"""Hold what the whole process shares: signals, random numbers, warnings, patches, the garbage collector.

While state is changed, Ctrl-C and SIGTERM are deferred; SIGTERM acts like Ctrl-C.
`docs/decisions.md` says why the signals are not blocked.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

_SIGNALS = (signal.SIGINT, signal.SIGTERM)

_P = ParamSpec("_P")
_R = TypeVar("_R")


class Stopped(KeyboardInterrupt):
    """A KeyboardInterrupt whose text names the signal."""


@contextmanager
def stopped_by_sigterm() -> Iterator[None]:
    """Raise `Stopped` inside the block on SIGTERM, which a cluster or a shell sends."""

    def stop(*_: Any) -> None:
        raise Stopped("stopped by SIGTERM")

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def held_interrupts() -> Iterator[None]:
    """Defer the Python handlers of SIGINT and SIGTERM until the block ends; blocks may be nested.

    Only the main thread runs them. What may hang is called by `interruptible`.
    """
    if _replaced or not _in_main_thread():
        yield
        return
    try:
        _hold()
        yield
    finally:
        _release()


def act_on_interrupts() -> None:
    """Run the handlers of deferred signals now, where they may raise: the work so far can be undone."""
    while _received and _in_main_thread():
        number = _received.pop(0)
        _replaced[number](number, sys._getframe())


def interruptible(call: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> _R:
    """Return `call(...)`, in which signals are not deferred; before and after it they are."""
    if not _replaced or not _in_main_thread():
        return call(*args, **kwargs)
    try:
        _release()
        result = call(*args, **kwargs)
        _hold()  # in the `try`: an interrupt before it belongs to the call
        return result
    finally:
        _hold()


# The handlers that are replaced, and the signals that arrived meanwhile.
_replaced: dict[int, Callable[..., Any]] = {}
_received: list[int] = []


def _hold() -> None:
    for number in _SIGNALS:
        handler = signal.getsignal(number)
        if number not in _replaced and callable(handler):
            # Stored first: an interrupt may come between any two lines until it is replaced.
            _replaced[number] = handler
            signal.signal(number, _receive)


def _release() -> None:
    """Restore the handlers, and send the signals again that were deferred."""
    try:
        while _replaced:
            number = next(reversed(_replaced))
            if signal.getsignal(number) is _receive:  # no other was set meanwhile
                signal.signal(number, _replaced[number])
            del _replaced[number]
        while _received:
            signal.raise_signal(_received.pop(0))
    finally:
        if _replaced or _received:  # the first signal's handler has raised
            _release()


def _receive(number: int, _frame: Any) -> None:
    if number not in _received:
        _received.append(number)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


# A thread holds it from a change of such state until that is restored: two threads that restore it in another
# order leave it wrong.
PROCESS_STATE = threading.RLock()


def is_ours() -> bool:
    """Return whether this thread changed such state: a call of a model is then one of ours."""
    return bool(PROCESS_STATE._is_owned())  # type: ignore[attr-defined]  # as threading.Condition asks


def _release_in_child() -> None:
    """Restore the handlers in a forked process, and the lock that a thread has which the process lacks."""
    if not is_ours():
        PROCESS_STATE._at_fork_reinit()  # type: ignore[attr-defined]  # as logging does for its locks
    _received.clear()
    _release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_release_in_child)


@contextmanager
def ignored_warnings(message: str = "") -> Iterator[None]:
    """Ignore the warnings whose text starts with the pattern `message`, in all threads."""
    with PROCESS_STATE, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message)
        yield


@contextmanager
def paused_collector() -> Iterator[None]:
    """Disable garbage collection inside the block.

    A table of 20,000 modules has some hundred thousand small objects, and none of them is garbage.
    The collector would scan all of them, and all of torch, dozens of times: half of the total time.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
