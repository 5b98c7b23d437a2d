"""Why a forward could not be followed without data, in plain words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prepare.core.forward.run_example import explained

if TYPE_CHECKING:
    from torch import nn

_NEEDS_VALUE = "needs the value of a tensor, as an if, a loop or .item() over data does"
_NEEDS_SHAPE = "gives a tensor whose shape depends on the data"
_NO_KERNEL = "cannot run without data"
# By the name of the class: torch has moved these around.
_REASONS = {
    "DataDependentOutputException": _NEEDS_VALUE,
    "GuardOnDataDependentSymNode": _NEEDS_VALUE,
    "DynamicOutputShapeException": _NEEDS_SHAPE,
    "UnsupportedOperatorException": _NO_KERNEL,
    "UnsupportedFakeTensorException": _NO_KERNEL,
}


def reason_for(model: nn.Module, error: Exception) -> str:
    """One sentence: which module, what it needs, and what to do."""
    problem = explained(model, error).problems[0]
    known = _REASONS.get(type(error).__name__)
    if known is None:
        return f"{problem.where}: {problem.wrong}; observe a real forward instead"
    operation = getattr(error, "func", None) or error
    return f"{problem.where}: {operation} {known}; observe a real forward instead"
