"""Rounds on a clock: all that are in play take a turn in each, in random order."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

_Player = TypeVar("_Player")


class Rounds:
    """The rounds of a bench, of a race of recipes, or of a rewrite; `count` are over.

    What is slow for a while slows all turns of a round, so times are compared within rounds. The caller says
    who is in play, and may add and drop players between two rounds.
    """

    def __init__(self, clock: Callable[[], float], seed: int = 0) -> None:
        self.count, self.clock, self._last = 0, clock, 0.0
        self._began, self._order = clock(), random.Random(seed)  # noqa: S311

    def turns(self, players: Sequence[_Player]) -> Iterator[_Player]:
        """Yield each player once, when it is its turn; with the last one the round is over."""
        began = self.clock()
        yield from self._order.sample(players, len(players))
        self.count, self._last = self.count + 1, self.clock() - began

    def seconds(self) -> float:
        """Return the seconds since these rounds were made."""
        return self.clock() - self._began

    def fits(self, limit: float) -> bool:
        """Return whether a round as long as the last one ends within `limit` seconds; the first one does."""
        return not self.count or self.seconds() + self._last <= limit
