"""Handle the calls of all modules: for the search of modules to keep in float32."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable
from typing import Any, Self

from torch import Tensor, nn

from prepare.core.forward.call import Call
from prepare.stages.verify.deviations import distance, is_finite, largest

# A function of the call, the module and its arguments, which returns the outputs.
_Handler = Callable[[Callable[[], Any], nn.Module, Call], Any]


class CallInterceptor:
    """While entered, gives every call of a module to `handle`; torch has no hook that can replace a call.

    It is entered once for many runs: each change of `Module.__call__` costs 2 ms with large libraries.
    """

    def __init__(self) -> None:
        self.handle: _Handler | None = None
        self._original, self._thread = nn.Module.__call__, threading.get_ident()

    def __enter__(self) -> Self:
        original = self._original

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self.handle is None or threading.get_ident() != self._thread:
                return original(module, *args, **kwargs)
            return self.handle(
                lambda: original(module, *args, **kwargs), module, Call(args, kwargs)
            )

        nn.Module.__call__ = call  # type: ignore[method-assign]
        return self

    def __exit__(self, *raised: object) -> None:
        nn.Module.__call__ = self._original  # type: ignore[method-assign]


def largest_error(pairs: Iterable[tuple[Tensor, Tensor]]) -> float:
    """Return the largest error of (exact, actual) tensors, each as a fraction of the largest exact number.

    Infinite if an actual number is not finite; tensors with an exact number that is not finite, and those of
    whole numbers, are left out.
    """
    worst = 0.0
    for exact, actual in pairs:
        if exact.is_floating_point() and is_finite(exact):
            error = distance(exact, actual) / (largest(exact) or 1.0)
            worst = max(worst, error if math.isfinite(error) else math.inf)
    return worst
