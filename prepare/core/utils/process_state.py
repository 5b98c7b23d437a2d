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

    if not _in_main_thread():
        yield
        return
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
    if _held is not None or not _in_main_thread():
        yield
        return
    hold = _Hold()
    try:
        hold.install()
        yield
    finally:
        hold.release()


def act_on_interrupts() -> None:
    """Run the handlers of deferred signals now, where they may raise: the work so far can be undone."""
    if _held is not None and _in_main_thread():
        _held.act()


def interruptible(call: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> _R:
    """Return `call(...)`, in which signals are not deferred; before and after it they are."""
    hold = _held
    if hold is None or not _in_main_thread():
        return call(*args, **kwargs)
    try:
        hold.release()
        result = call(*args, **kwargs)
        hold.install()  # in the `try`: an interrupt before it belongs to the call
        return result
    finally:
        hold.install()


class _Hold:
    """The handlers that are replaced, and the signals that arrived meanwhile."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self._replaced: dict[int, Callable[..., Any]] = {}

    def install(self) -> None:
        """Replace each handler that is a Python function, unless it is replaced already."""
        global _held  # noqa: PLW0603
        for number in _SIGNALS:
            handler = signal.getsignal(number)
            if number not in self._replaced and callable(handler):
                # Stored first: an interrupt may come between any two lines until it is replaced.
                self._replaced[number] = handler
                signal.signal(number, self._receive)
        _held = self

    def release(self) -> None:
        """Restore the handlers, and send the signals again that were deferred."""
        global _held  # noqa: PLW0603
        _held = None
        try:
            while self._replaced:
                number = next(reversed(self._replaced))
                if signal.getsignal(number) == self._receive:  # no other was set meanwhile
                    signal.signal(number, self._replaced[number])
                del self._replaced[number]
            while self.received:
                signal.raise_signal(self.received.pop(0))
        finally:
            if self._replaced or self.received:  # the first signal's handler has raised
                self.release()

    def act(self) -> None:
        """Call the handlers of the deferred signals."""
        while self.received:
            number = self.received.pop(0)
            self._replaced[number](number, sys._getframe())

    def _receive(self, number: int, _frame: Any) -> None:
        if number not in self.received:
            self.received.append(number)


_held: _Hold | None = None


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
    if _held is not None:
        _held.received.clear()
        _held.release()


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
