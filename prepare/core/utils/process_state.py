"""One lock for what all threads share: random numbers, filters of warnings, patches of torch's classes."""

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
