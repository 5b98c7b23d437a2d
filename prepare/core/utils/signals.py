"""Ctrl-C and its kin: held back while something must not be cut in two, and one way out for all of them."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopped(KeyboardInterrupt):
    """As Ctrl-C, and says who stopped it."""


@contextmanager
def stopped_by_sigterm() -> Iterator[None]:
    """Makes SIGTERM, which a cluster or a shell sends, end what runs within as Ctrl-C does."""

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
    """Holds Ctrl-C and SIGTERM back until the block ends; only the main thread ever receives one."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[tuple[int, Any]] = []
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    for number in _SIGNALS:
        signal.signal(number, lambda *received: held.append(received))
    try:
        yield
    finally:
        for number in _SIGNALS:
            signal.signal(number, before[number])
        for number, frame in held[:1]:
            if callable(handler := before[number]):
                handler(number, frame)
            elif handler == signal.SIG_DFL:
                signal.raise_signal(number)
