"""Hold what all threads of the process share: random numbers, warnings, patches, the garbage collector."""

import gc
import math
import os
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from prepare.core.utils.signals import act_on_interrupts

# Seconds.
_PAUSE = 0.1


class ProcessLock:
    """A reentrant lock that is free in a forked child if a thread held it that the child does not have."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._release_of_others)

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:  # noqa: FBT001, FBT002  as a lock's
        """Take the lock; while another thread has it, Ctrl-C acts, also where it is deferred."""
        if not blocking:
            return self._lock.acquire(blocking=False)
        end = math.inf if timeout < 0 else time.monotonic() + timeout
        while not self._lock.acquire(timeout=max(min(_PAUSE, end - time.monotonic()), 0)):
            act_on_interrupts()
            if time.monotonic() >= end:
                return False
        return True

    def release(self) -> None:
        """Give the lock back."""
        self._lock.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def _release_of_others(self) -> None:
        if self._lock.acquire(blocking=False):
            self._lock.release()
        else:
            self._lock = threading.RLock()


# A thread holds it from a change of such state until that is restored: two threads that restore it in another
# order leave it wrong.
PROCESS_STATE = ProcessLock()


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
