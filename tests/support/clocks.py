"""Simulated clocks for tests of timing."""

from __future__ import annotations

import math
import random


class Clock:
    """A clock that advances only when a call of one of its variants takes time."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def takes(self, seconds, *, log=None, name="", breaks_at=math.inf):
        """Return a variant whose call takes that long: a number, or a function that returns one."""
        calls = []

        def call(x):
            calls.append(name)
            if len(calls) > breaks_at:
                raise MemoryError("no more")
            if log is not None:
                log.append(name)
            self.now += seconds() if callable(seconds) else seconds
            return x

        return call


def noisy(mean, spread, seed):
    """Return a function that draws times with a log-normal spread around `mean`."""
    order = random.Random(seed)
    return lambda: mean * math.exp(order.gauss(0, spread))
