"""Reduce a failed verification, a crash or a slow kernel to a script of at most 25 lines with torch alone.

Examples:
    >>> import torch
    >>> from torch import nn
    >>> from prepare.stages.reduce import reduce
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
    >>> reduce(model, torch.randn(2, 3, 8, 8), isolated=False) is None
    True
"""

from typing import TYPE_CHECKING

from prepare.core.utils.lazy_names import lazy_names

if TYPE_CHECKING:
    from prepare.stages.reduce.records import ModuleCall, Reduction
    from prepare.stages.reduce.search import reduce

__all__ = ["ModuleCall", "Reduction", "reduce"]

__getattr__ = lazy_names(
    __name__,
    records=("ModuleCall", "Reduction"),
    search=("reduce",),
)
