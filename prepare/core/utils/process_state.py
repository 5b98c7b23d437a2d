"""Guard what all threads of the process share: random numbers, warnings, patches, the garbage collector."""

import gc
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

# A thread holds it from a change of such state until that is restored: two threads that restore it in another
# order leave it wrong.
PROCESS_STATE = threading.RLock()


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
