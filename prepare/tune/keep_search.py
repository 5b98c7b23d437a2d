"""Search the fewest modules that have to stay in float32 for a 16-bit recipe to be right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from prepare.tune.compare_candidates import CheckResult

# Verifies the recipe with these modules kept.
Attempt = Callable[[tuple[str, ...]], CheckResult]


@dataclass(frozen=True, slots=True)
class Search:
    """The end of a search: the modules to keep, or None, and their verification.

    `is_complete` is False if the time was over: then fewer modules, or others, may be enough.
    """

    modules: tuple[str, ...] | None
    checked: CheckResult | None
    attempts: int
    is_complete: bool


class KeepSearch:
    """Keep the modules in `order` one after the other until the recipe passes; then try without each.

    The number of kept modules is doubled, and halved between the last one that fails and the first one that
    passes. `has_time` says whether one more attempt may begin.
    """

    def __init__(
        self, order: Sequence[str], attempt: Attempt, has_time: Callable[[], bool]
    ) -> None:
        self._order, self._attempt, self._has_time = tuple(order), attempt, has_time
        self._best: tuple[tuple[str, ...], CheckResult] | None = None
        self._attempts, self._in_time = 0, True

    def run(self) -> Search:
        """Run the search. That no module is kept is known to fail."""
        few, many = 0, min(1, len(self._order))
        while many and not self._passes(self._order[:many]):
            few, many = many, min(2 * many, len(self._order))
            if few == many or not self._in_time:
                return Search(None, None, self._attempts, self._in_time)
        while self._in_time and few + 1 < many:
            middle = (few + many) // 2
            few, many = (few, middle) if self._passes(self._order[:middle]) else (middle, many)
        if self._best is None:
            return Search(None, None, self._attempts, self._in_time)
        # The last one of the best set is needed: without it the set failed.
        for module in reversed(self._best[0]):
            fewer = tuple(each for each in self._best[0] if each != module)
            if fewer and module != self._order[many - 1]:
                self._passes(fewer)
        return Search(*self._best, self._attempts, self._in_time)

    def _passes(self, modules: tuple[str, ...]) -> bool:
        modules = _outermost(modules)
        if not self._in_time or not self._has_time():
            self._in_time = False
            return False
        self._attempts += 1
        checked = self._attempt(modules)
        if checked.status != "pass":
            return False
        self._best = modules, checked
        return True


def _outermost(modules: tuple[str, ...]) -> tuple[str, ...]:
    """Leave out the modules inside others: these are kept anyway."""
    return tuple(
        each for each in modules if not any(each.startswith(f"{other}.") for other in modules)
    )
