"""Record the properties of a prepared model, and check them in continuous integration.

Examples:
    >>> import torch
    >>> from torch import nn
    >>> from prepare.stages.contract import check, record
    >>> model, batch = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()), torch.randn(2, 3, 8, 8)
    >>> contract = record(model, batch, {"conv2d_memory_format": {}})
    >>> contract.layouts
    {'0': 'channels_last'}
    >>> check(model, batch, contract).status
    'kept'
"""

from typing import TYPE_CHECKING

from prepare.core.utils.lazy_names import lazy_names

if TYPE_CHECKING:
    from prepare.stages.contract.observe import check, record
    from prepare.stages.contract.records import Contract, ContractChange, ContractCheck

__all__ = ["Contract", "ContractChange", "ContractCheck", "check", "record"]

__getattr__ = lazy_names(
    __name__,
    records=("Contract", "ContractChange", "ContractCheck"),
    observe=("check", "record"),
)
