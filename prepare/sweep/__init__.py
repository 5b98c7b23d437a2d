"""Sweeps: the processes that execute many jobs, the order they share, and the table of their results.

`read` gives the rows of a finished or running sweep to Python; it loads no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prepare.sweep.rows import SweepRows, read

__all__ = ["SweepRows", "read"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from prepare.sweep import rows

        return getattr(rows, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
