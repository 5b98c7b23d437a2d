"""The time and memory that a verification may use."""

from __future__ import annotations

import time

import torch
from torch import nn

from prepare.core.model.devices import free_memory
from prepare.core.model.tensors import name_of
from prepare.core.utils.text import size

SECONDS = {"short": 30.0, "full": 600.0}
# A model whose runs take long gets the time of so many of its steps, up to a limit in seconds.
_STEPS, _LONGEST = 20, 300.0
# The memory limit is this part of the free memory; the bytes where the system does not report it.
_FREE_PART, _UNKNOWN_MEMORY = 0.5, 4 * 2**30


class Budget:
    """The seconds and bytes that are left.

    Without a limit of the user's, a large model gets more time, and that of other programs does not count.
    """

    def __init__(self, level: str, seconds: float | None, memory: int) -> None:
        self._given, self.seconds, self._memory = seconds, seconds or SECONDS[level], memory
        self._start, self._own = time.monotonic(), time.process_time()

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
        if memory > self._memory:
            limit = f"the limit is {size(self._memory)}; raise verify.memory"
            return f"{run} needs about {size(memory)}, {limit}"
        if seconds > self.left():
            rest = f"{max(self.left(), 0):.0f} of {self.seconds:.0f} s are left"
            return f"{run} takes about {seconds:.2g} s, but {rest}; raise verify.seconds"
        return ""


def time_limit(seconds: float, step: float) -> float:
    """Return the limit of the time of a model whose step takes `step` seconds, at least `seconds`."""
    return max(seconds, min(_STEPS * step, _LONGEST))


def default_memory(model: nn.Module) -> int:
    """Return half of the free memory: that of the model's device, but no more than that of the CPU."""
    devices = {tensor.device for tensor in model.parameters()} | {torch.device("cpu")}
    free = [count for device in devices if (count := free_memory(device)) is not None]
    return int(_FREE_PART * min(free)) if free else _UNKNOWN_MEMORY
