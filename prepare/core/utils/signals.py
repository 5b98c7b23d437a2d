"""Defer Ctrl-C and SIGTERM while state is changed, and handle SIGTERM like Ctrl-C.

`docs/decisions.md` says why the signals are not blocked.
"""

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, TypeVar

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# Bytes for a `struct sigaction`, which has 152 on Linux and 16 on macOS.
_ACTION = 512
# The first field of the struct is the handler; some systems leave garbage in others.
_HANDLER = ctypes.sizeof(ctypes.c_void_p)
# After so many signals the step that runs seems to hang.
_PATIENCE = 3

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
def held_interrupts(*, may_hang: bool = False) -> Iterator[None]:
    """Defer the Python handlers of SIGINT and SIGTERM until the block ends; blocks may be nested.

    Only the main thread runs them. With `may_hang` the third signal acts at once, outside of inner blocks.
    A handler of C code, and the default action, are left alone.
    """
    if not _in_main_thread():
        yield
        return
    if (outer := _held) is not None:
        before, outer.may_hang = outer.may_hang, False
        try:
            yield
        finally:
            outer.may_hang = before
        return
    hold = _Hold(may_hang=may_hang)
    try:
        hold.install()
        yield
    finally:
        hold.release()


def act_on_interrupts() -> None:
    """Run the handlers of deferred signals now, where they may raise: the work so far can be undone."""
    if _held is not None and _in_main_thread():
        _held.act()


def interrupts_wait() -> bool:
    """Return whether signals are deferred; any thread may ask."""
    hold = _held
    return hold is not None and bool(hold.waiting())


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


class _Replaced(NamedTuple):
    """A Python handler, and what the system had: before, and with our handler in its place."""

    handler: Callable[..., Any]
    before: bytes | None
    ours: bytes | None

    @property
    def by_python(self) -> bool:
        """Return whether Python's own handler was there, and not one of C code before it."""
        return _handler(self.before) == _handler(self.ours)


class _Hold:
    """The handlers that are replaced, and the signals that arrived meanwhile."""

    def __init__(self, *, may_hang: bool) -> None:
        self.may_hang, self.received, self._count = may_hang, list[int](), 0
        self._replaced: dict[int, _Replaced] = {}

    def install(self) -> None:
        """Replace each handler that is a Python function, unless it is replaced already."""
        global _held  # noqa: PLW0603
        for number in _SIGNALS:
            handler = signal.getsignal(number)
            if number not in self._replaced and callable(handler):
                before = _action(number)
                # Stored first: an interrupt may come between any two lines until it is replaced.
                self._replaced[number] = _Replaced(handler, before, before)
                signal.signal(number, self._receive)
                self._replaced[number] = _Replaced(handler, before, _action(number))
        _held = self

    def release(self) -> None:
        """Restore the handlers, and send the signals again that were deferred."""
        global _held  # noqa: PLW0603
        _held = None
        try:
            while self._replaced:
                number = next(reversed(self._replaced))
                self._restore(number, self._replaced[number])
                del self._replaced[number]
            while self.received:
                signal.raise_signal(self.received.pop(0))
        finally:
            if self._replaced or self.received:  # the first signal's handler has raised
                self.release()

    def act(self) -> None:
        """Call the handlers of the deferred signals; not if C code handles them first."""
        while waiting := self.waiting():
            self.received.remove(waiting[0])
            self._replaced[waiting[0]].handler(waiting[0], sys._getframe())

    def waiting(self) -> list[int]:
        """Return the deferred signals that `act` handles."""
        return [number for number in self.received if self._replaced[number].by_python]

    def _restore(self, number: int, replaced: _Replaced) -> None:
        if signal.getsignal(number) != self._receive:  # another handler was set meanwhile
            return
        now = _action(number)
        signal.signal(number, replaced.handler)
        _set_action(number, replaced.before if _handler(now) == _handler(replaced.ours) else now)

    def _receive(self, number: int, frame: Any) -> None:
        self._count += 1
        if self.may_hang and self._count >= _PATIENCE:
            self._replaced[number].handler(number, frame)
        elif number not in self.received:
            self.received.append(number)


_held: _Hold | None = None


def _release_in_child() -> None:
    """Restore the handlers in a forked process, which may never leave the block."""
    if _held is not None:
        _held.received.clear()
        _held.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_release_in_child)


def runs(process: int) -> bool:
    """Return whether a process of this machine runs, or may do so."""
    if os.name != "posix":  # on Windows os.kill ends the process
        return True
    with suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:  # a process of another user
        pass
    return True


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _sigaction() -> Callable[..., int] | None:
    """Return the system's function; `signal.getsignal` does not know of a handler that C code has set."""
    try:
        return ctypes.CDLL(None).sigaction
    except (OSError, AttributeError, TypeError):  # Windows, where C code sets handlers otherwise
        return None


_SIGACTION = _sigaction()


def _action(number: int) -> bytes | None:
    """Return how the process handles a signal, as the system describes it."""
    if _SIGACTION is None:
        return None
    action = ctypes.create_string_buffer(_ACTION)
    return action.raw if _SIGACTION(int(number), None, action) == 0 else None


def _handler(action: bytes | None) -> bytes | None:
    return action and action[:_HANDLER]


def _set_action(number: int, action: bytes | None) -> None:
    if _SIGACTION is not None and action is not None:
        _SIGACTION(int(number), ctypes.create_string_buffer(action, _ACTION), None)
