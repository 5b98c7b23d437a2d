"""Defer SIGINT and SIGTERM during critical sections, and handle SIGTERM like Ctrl-C."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopped(KeyboardInterrupt):
    """A KeyboardInterrupt whose text names the signal."""


@contextmanager
def stopped_by_sigterm() -> Iterator[None]:
    """Raise `Stopped` inside the block on SIGTERM, which a cluster or a shell sends."""

    def stop(*_: Any) -> None:
        raise Stopped("stopped by SIGTERM")

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def held_interrupts() -> Iterator[None]:
    """Defer SIGINT and SIGTERM until the block ends; only the main thread receives signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    deferred: list[tuple[int, Any]] = []
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    for number in _SIGNALS:
        signal.signal(number, lambda *received: deferred.append(received))
    try:
        yield
    finally:
        for number in _SIGNALS:
            signal.signal(number, before[number])
        for received, frame in deferred[:1]:
            if callable(handler := before[signal.Signals(received)]):
                handler(received, frame)
            elif handler == signal.SIG_DFL:
                signal.raise_signal(received)
