"""File locks that show which process runs a sweep or a job; the OS releases them when it dies."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from prepare.core.utils.files import open_unlinked

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]  # typeshed has no None for a missing module

# Seconds. A process that only asks holds the lock for a moment, which is not a reason to give up.
_PATIENCE = 0.2
_PAUSES = 0.01, 0.25


class Lock:
    """A lock of the folder at `path`, or of the file, which is created if missing; `close` releases it.

    Where the system has no such locks (Windows, some network folders), `acquire` always succeeds.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            self._handle = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        else:
            flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0)
            self._handle = open_unlinked(str(path), flags)

    def acquire(self, *, shared: bool = False, patience: float = _PATIENCE) -> bool:
        """Return True if the lock was acquired within `patience` seconds; a shared one has many holders."""
        if fcntl is None:
            return True
        mode = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        deadline, pause = time.monotonic() + patience, _PAUSES[0]
        while True:
            try:
                fcntl.flock(self._handle, mode | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    return False
                time.sleep(pause)
                pause = min(2 * pause, _PAUSES[1])
            except OSError:  # this file system has no locks
                return True
            else:
                return True

    def close(self) -> None:
        """Release the lock; a second call does nothing."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


@contextmanager
def claim(path: Path | None) -> Iterator[bool]:
    """Hold the lock of `path` within the block; yield False if another process holds it.

    None needs no lock. If no lock can be made (a full disk), yield True: what runs in the block will
    report the reason.
    """
    try:
        lock = None if path is None else Lock(path)
    except OSError:
        lock = None
    try:
        yield lock is None or lock.acquire()
    finally:
        if lock is not None:
            lock.close()


def is_held(path: Path, *, patience: float = 0.0) -> bool:
    """Return True if a process holds the lock of `path` now, and still after `patience` seconds."""
    if not path.is_file():
        return False
    with suppress(OSError):
        lock = Lock(path)
        try:
            return not lock.acquire(patience=patience)
        finally:
            lock.close()
    return False
