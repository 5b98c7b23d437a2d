"""Clocks for tests of timing: they advance only when told to."""

from __future__ import annotations

import math
import random


class Clock:
    """A clock that goes on only when it is told to."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def takes(self, spent, *, log=None, name="", breaks_at=math.inf):
        """A variant whose call takes that long: a number, or a function without arguments."""
        calls = []

        def call(x):
            calls.append(name)
            if len(calls) > breaks_at:
                raise MemoryError("no more")
            if log is not None:
                log.append(name)
            self.now += spent() if callable(spent) else spent
            return x

        return call


def noisy(mean, spread, seed):
    order = random.Random(seed)
    return lambda: mean * math.exp(order.gauss(0, spread))
