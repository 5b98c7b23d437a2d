"""Watch a prepared model while it serves and trains: compare its modules with torch's own, one at a time.

`Pipeline.guard` makes one. docs/guard.md says what it looks at, when, and what it costs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prepare.guard.compare import WrongModule
    from prepare.guard.model_guard import ModelGuard

__all__ = ["ModelGuard", "WrongModule"]


def __getattr__(name: str) -> Any:
    if name == "ModelGuard":  # loads torch
        from prepare.guard.model_guard import ModelGuard

        return ModelGuard
    if name == "WrongModule":
        from prepare.guard.compare import WrongModule

        return WrongModule
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
