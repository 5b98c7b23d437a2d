"""The time and memory that a verification may use."""

from __future__ import annotations

import time

import torch
from torch import nn

from prepare.core.model.devices import free_memory
from prepare.core.model.tensors import name_of
from prepare.core.utils.text import size

SECONDS = 30.0
# A model whose runs take long gets the time of so many of its steps, up to a limit in seconds.
_STEPS, _LONGEST = 20, 300.0
# A run may use this part of the free memory.
_FREE_PART = 0.5


class Budget:
    """The seconds and bytes that are left.

    Without a limit of the user's, a large model gets more time, and that of other programs does not count.
    """

    def __init__(self, seconds: float | None, model: nn.Module) -> None:
        self._given, self.seconds = seconds, seconds or SECONDS
        self._start, self._own = time.monotonic(), time.process_time()
        devices = {tensor.device for tensor in model.parameters()} | {torch.device("cpu")}
        self._free = min(filter(None, map(free_memory, devices)), default=None)

    def extend(self, step: float) -> None:
        """Give a model more time whose step takes so many seconds."""
        if self._given is None:
            self.seconds = time_limit(self.seconds, step)

    def spent(self) -> float:
        """Return the seconds on the clock since the start."""
        return time.monotonic() - self._start

    def left(self) -> float:
        """Return the seconds that are left."""
        if self._given is not None:
            return self.seconds - self.spent()
        own = min(self.spent(), time.process_time() - self._own)
        return min(self.seconds - own, max(self.seconds, _LONGEST) - self.spent())

    def refuses(self, seconds: float, numbers: float, dtype: torch.dtype) -> str:
        """Say why a run of so many seconds that holds so many numbers does not fit; empty if it fits."""
        run, memory = f"a call in {name_of(dtype)}", int(numbers * dtype.itemsize)
        if self._free is not None and memory > _FREE_PART * self._free:
            what = f"{size(memory)}, but {size(self._free)} are free"
            return f"{run} needs about {what}; make the batch smaller"
        rest = f"{max(self.left(), 0):.0f} of {self.seconds:.0f} s are left"
        takes = f"{run} takes about {seconds:.2g} s, but {rest}; raise verify.seconds"
        return takes if seconds > self.left() else ""


def time_limit(seconds: float, step: float) -> float:
    """Return the limit of the time of a model whose step takes `step` seconds, at least `seconds`."""
    return max(seconds, min(_STEPS * step, _LONGEST))
