"""The looks at which a bench may stop because its verdict is settled, and the error that each may spend.

A bench that looks again and again finds a difference by chance sooner or later. So there are few looks, at
fixed numbers of rounds, and their error probabilities add up to that of the whole bench.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prepare.bench.samples import SampleSet

# Eight ratios are the fewest that have an interval at the confidence of one look.
ROUNDS = (8, 16, 32, 64)
# The looks above, and the one at the end of the budget.
_COUNT = len(ROUNDS) + 1
# Seconds of timing before the first look: a stall of the machine is shorter.
_MIN_SECONDS = 1.0


class Looks:
    """The looks of one bench; each spends a fifth of the error, and the end spends what is left."""

    def __init__(self) -> None:
        self._taken, self.is_settled = 0, False

    def look(self, samples: SampleSet, rounds: int, seconds: float) -> SampleSet | None:
        """Return the samples at the confidence of a look if every verdict is settled; else None."""
        if rounds not in ROUNDS or seconds < _MIN_SECONDS:
            return None
        self._taken += 1
        at_look = _spending(samples, 1 / _COUNT)
        self.is_settled = at_look.is_settled()
        return at_look if self.is_settled else None

    def end(self, samples: SampleSet) -> SampleSet:
        """Return the samples at the confidence that the looks have left for the end of the budget."""
        return _spending(samples, 1 - self._taken / _COUNT)


def _spending(samples: SampleSet, part: float) -> SampleSet:
    """Return the samples with intervals that spend this part of the error probability."""
    return replace(samples, confidence=1 - (1 - samples.confidence) * part)
