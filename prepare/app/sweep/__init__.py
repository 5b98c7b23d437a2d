"""Sweeps: the processes that execute many jobs, and the table of their results.

`read` gives the rows of a finished or running sweep to Python; it loads no torch.
"""

from typing import TYPE_CHECKING

from prepare.core.utils.packages import lazy_names

if TYPE_CHECKING:
    from prepare.app.sweep.summary import read

__all__ = ["read"]

__getattr__ = lazy_names(__name__, summary=("read",))
