"""Reduce a failed verification, a crash or a slow kernel to a script of at most 25 lines with torch alone.

Examples:
    >>> import torch
    >>> from torch import nn
    >>> from prepare.reduce import reduce
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
    >>> reduce(model, torch.randn(2, 3, 8, 8), isolated=False) is None
    True
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prepare.reduce.records import ModuleCall, Reduction

if TYPE_CHECKING:
    from prepare.reduce.search import reduce

__all__ = ["ModuleCall", "Reduction", "reduce"]


def __getattr__(name: str) -> Any:
    if name == "reduce":  # loads torch
        from prepare.reduce.search import reduce

        return reduce
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
