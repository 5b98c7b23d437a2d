"""Watch a prepared model while it serves and trains: compare its modules with torch's own, one at a time.

`Pipeline.guard` makes one. docs/guard.md says what it looks at, when, and what it costs.
"""

from typing import TYPE_CHECKING

from prepare.core.utils.lazy_names import lazy_names

if TYPE_CHECKING:
    from prepare.guard.model_guard import ModelGuard
    from prepare.guard.respond import WrongModule

__all__ = ["ModelGuard", "WrongModule"]

__getattr__ = lazy_names(
    __name__,
    model_guard=("ModelGuard",),
    respond=("WrongModule",),
)
