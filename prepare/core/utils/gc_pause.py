"""Python's garbage collector, held back while a large table is built."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused_collector() -> Iterator[None]:
    """No collection inside the block.

    A table of 20,000 modules is some hundred thousand small objects, none of them garbage. The
    collector would look through all of them, and through all of torch, dozens of times: half of
    the time spent.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
