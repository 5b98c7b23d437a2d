"""Record the properties of a prepared model, and check them in continuous integration.

Examples:
    >>> import torch
    >>> from torch import nn
    >>> from prepare.contract import check, record
    >>> model, batch = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()), torch.randn(2, 3, 8, 8)
    >>> contract = record(model, batch, {"conv2d_memory_format": {}})
    >>> contract.layouts
    {'0': 'channels_last'}
    >>> check(model, batch, contract).status
    'kept'
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prepare.contract.records import Contract, ContractChange, ContractCheck

if TYPE_CHECKING:
    from prepare.contract.observe import check, record

__all__ = ["Contract", "ContractChange", "ContractCheck", "check", "record"]


def __getattr__(name: str) -> Any:
    if name in ("check", "record"):  # loads torch
        from prepare.contract import observe

        return getattr(observe, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
