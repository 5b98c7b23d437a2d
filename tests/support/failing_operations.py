"""Make torch operations fail one at a time, or interrupt between two lines."""

from __future__ import annotations

import contextlib
import signal
import sys
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import prepare

SOURCES = str(Path(prepare.__file__).parent)


class FailAt(TorchDispatchMode):
    """Count operations, and raise at the given number."""

    def __init__(self, number, error):
        super().__init__()
        self.number, self.error, self.count = number, error, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        if self.count == self.number:
            raise self.error
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def interrupt_at(line):
    """Send this process a real SIGINT after `line` lines of our own code have run."""
    count = 0

    def local(frame, event, arg):
        nonlocal count
        if event == "line":
            count += 1
            if count == line:
                signal.raise_signal(signal.SIGINT)
        return local

    def trace(frame, event, arg):
        return local if frame.f_code.co_filename.startswith(SOURCES) else None

    # A shell that starts this in the background may have made it ignore the signal.
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    before, gradients = sys.gettrace(), torch.is_grad_enabled()
    overriding = torch._C._get_torch_function_state()
    sys.settrace(trace)
    try:
        yield lambda: count
    finally:
        sys.settrace(before)
        signal.signal(signal.SIGINT, handler)
        # An exception that the tracer raises at the end of a `with` skips its exit.
        torch.set_grad_enabled(gradients)
        torch._C._set_torch_function_state(overriding)
