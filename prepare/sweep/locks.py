"""Who is at work: locks of files, which the system drops when a process ends, in whatever way."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

# Whoever only asks takes a lock too, for a moment: it is no reason to give up.
_PATIENCE = 0.2
_PAUSES = 0.01, 0.25


class Lock:
    """A lock of the file at `path`, which is made where it is not there; `close` drops it.

    Where there are no such locks (Windows, some network folders) each is taken at once.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o666)

    def take(self, *, shared: bool = False, patience: float = _PATIENCE) -> bool:
        """Whether it could be had within `patience` seconds; a shared one is for all that share it."""
        if fcntl is None:
            return True
        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        until, pause = time.monotonic() + patience, _PAUSES[0]
        while True:
            try:
                fcntl.flock(self._handle, kind | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= until:
                    return False
                time.sleep(pause)
                pause = min(2 * pause, _PAUSES[1])
            except OSError:  # this file system has no locks
                return True
            else:
                return True

    def close(self) -> None:
        """Drops it; twice is once."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


@contextmanager
def claimed(path: Path | None) -> Iterator[bool]:
    """Holds the lock of `path` within, if no other process does; None needs none.

    Where no lock can be made (a full disk), it is held all the same: what is done within will say why.
    """
    try:
        lock = None if path is None else Lock(path)
    except OSError:
        lock = None
    try:
        yield lock is None or lock.take()
    finally:
        if lock is not None:
            lock.close()


def held(path: Path, *, patience: float = 0.0) -> bool:
    """Whether a process holds the lock of `path`, and goes on to do so for `patience` seconds."""
    if not path.is_file():
        return False
    with suppress(OSError):
        lock = Lock(path)
        try:
            return not lock.take(patience=patience)
        finally:
            lock.close()
    return False
