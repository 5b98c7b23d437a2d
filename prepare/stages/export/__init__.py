"""Export a prepared model, and check the artefact in another process: its outputs, and its input layouts.

Examples:
    >>> from torch import nn, randn
    >>> from prepare.stages.export import export
    >>> from prepare.pipeline import Pipeline
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()).eval()
    >>> pipeline = Pipeline.from_config({"conv2d_memory_format": {}, "input_format": {}})
    >>> done = export(model, randn(2, 3, 8, 8), to="onnx", folder="out", pipeline=pipeline)  # doctest: +SKIP
    >>> done.status, done.contract.layouts  # doctest: +SKIP
    ('pass', {'contiguous': 'right', 'channels_last': 'right', ...})
"""

from typing import TYPE_CHECKING

from prepare.core.utils.lazy_names import lazy_names
from prepare.stages.export.exporter import EXPORTERS, Exporter, register

if TYPE_CHECKING:
    from prepare.stages.export.records import (
        ArtefactContract,
        Export,
        InputContract,
        LayoutCheck,
        TakenOut,
    )
    from prepare.stages.export.session import check, export

__all__ = [
    "EXPORTERS",
    "ArtefactContract",
    "Export",
    "Exporter",
    "InputContract",
    "LayoutCheck",
    "TakenOut",
    "check",
    "export",
    "register",
]

__getattr__ = lazy_names(
    __name__,
    records=("ArtefactContract", "Export", "InputContract", "LayoutCheck", "TakenOut"),
    session=("check", "export"),
)
