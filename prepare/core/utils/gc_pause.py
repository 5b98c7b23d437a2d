"""Pause Python's garbage collector while a large table is built."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


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
