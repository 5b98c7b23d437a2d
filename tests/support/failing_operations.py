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
    """Raises at the operation of that number; counts them."""

    def __init__(self, number, error):
        super().__init__()
        self.left, self.error, self.count = number, error, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        if self.count == self.left:
            raise self.error
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def interrupt_at(line):
    """Sends this process a real Ctrl-C when that many lines of our own code have run."""
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

    before, gradients = sys.gettrace(), torch.is_grad_enabled()
    overriding = torch._C._get_torch_function_state()
    sys.settrace(trace)
    try:
        yield lambda: count
    finally:
        sys.settrace(before)
        # What is raised at the line of a `with` as it ends, which a tracer can, leaves it without its exit.
        torch.set_grad_enabled(gradients)
        torch._C._set_torch_function_state(overriding)
