"""Decide which modules a training step looks at, and say how many steps it takes to look at all of them."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

# The most keys that are remembered; a key of before then has a new turn.
_KEYS = 1 << 16


@dataclass
class _Key:
    """The steps and looks of one key, and the position of the module with which its turn began."""

    first: int
    steps: int = 0
    looks: int = 0


class Turns:
    """Takes modules in turn: each once in `every` steps of a key, or as often as `share` of the time allows.

    A module more is due as soon as the time of all looks so far, and of the longest, is within the share.
    """

    def __init__(self, *, every: int, share: float) -> None:
        self._every, self._share = every, share
        self.keys: dict[Hashable, _Key] = {}
        self._due, self._steps, self._looks = 0.0, 0, 0
        self._began, self._spent, self._longest, self._compared = math.nan, 0.0, 0.0, 0

    def next(self, key: Hashable, names: Sequence[str]) -> list[str]:
        """Count a step with this key, and return the names of the modules that it looks at."""
        now, rate = time.perf_counter(), len(names) / self._every
        self._began = now if math.isnan(self._began) else self._began
        self._steps += 1
        if len(self.keys) >= _KEYS:
            self.keys.clear()
        turn = self.keys.setdefault(key, _Key(self._looks))
        turn.steps += 1
        self._due = min(self._due + rate, float(len(names)))
        # So each key has its share of the looks, and each module its turn.
        is_over = self._spent + self._longest > self._share * (now - self._began)
        if self._due < 1 or turn.looks >= turn.steps * rate or is_over:
            return []
        count = min(int(self._due), math.ceil(rate))
        chosen = [names[(turn.first + turn.looks + each) % len(names)] for each in range(count)]
        self._due -= count
        self._looks += count
        turn.looks += count
        return chosen

    def add(self, seconds: float) -> None:
        """Add the time of one look."""
        self._spent, self._longest = self._spent + seconds, max(self._longest, seconds)
        self._compared += 1

    def steps_of_all(self, count: int) -> int:
        """Return in how many steps `count` modules are looked at once, by the times of the looks so far."""
        steps = self._steps - 1  # the last has not ended
        if steps < 1 or not self._compared:
            return self._every
        step = (time.perf_counter() - self._began - self._spent) / steps
        needed = count * self._spent / self._compared
        return max(self._every, math.ceil(needed / (self._share * step)))
