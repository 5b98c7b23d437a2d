"""Make torch operations fail one at a time, or interrupt between two lines."""

from __future__ import annotations

import contextlib
import gc
import signal
import sys
import warnings
from pathlib import Path

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

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


def thread_state():
    """Return what a `with` whose exit is skipped would leave behind in this thread, and in the process."""
    return (
        [type(mode) for mode in _get_current_dispatch_mode_stack()],
        [type(mode) for mode in _get_current_function_mode_stack()],
        torch._C._is_torch_function_enabled(),
        torch._C._is_torch_function_all_disabled(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_default_dtype(),
        torch.get_num_threads(),
        nn.Module.__call__,
        nn.Module.__getattr__,
        len(torch_module._global_forward_hooks),
        list(warnings.filters),
        gc.isenabled(),
        str(Path.cwd()),
        list(sys.path),
    )


def first_middle_and_last(places):
    """Return the numbers of the runs of each line: one in a loop need not be interrupted in all of them."""
    numbers = {}
    for number, place in enumerate(places, start=1):
        numbers.setdefault(place, []).append(number)
    return sorted(
        {n for all_ in numbers.values() for n in (all_[0], all_[len(all_) // 2], all_[-1])}
    )


@contextlib.contextmanager
def interrupt_at(line, places=None):
    """Send this process a real SIGINT after `line` lines of our own code have run.

    `places` gets the file, the number and the function of each line.
    """
    count = 0

    def local(frame, event, arg):
        nonlocal count
        if event == "line":
            count += 1
            if places is not None:
                code = frame.f_code
                places.append((code.co_filename, frame.f_lineno, code.co_name))
            if count == line:
                sys.settrace(None)  # the rest is faster
                signal.raise_signal(signal.SIGINT)
        return local

    def trace(frame, event, arg):
        return local if frame.f_code.co_filename.startswith(SOURCES) else None

    before, state = sys.gettrace(), thread_state()
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    sys.settrace(trace)
    try:
        yield lambda: count
    finally:
        sys.settrace(before)
        assert thread_state() == state, f"line {line}"
        now = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
        assert now == handlers, f"line {line}"
