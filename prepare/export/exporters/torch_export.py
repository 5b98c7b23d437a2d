"""Export a program of torch.export, which runs in torch without the model's code."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from prepare.export.exporter import Exporter, Loaded, register


@register("torch_export")
class TorchExport(Exporter):
    """A program of torch.export (.pt2): it keeps strides, so repairs and rewritten calls go along."""

    suffix: ClassVar[str] = ".pt2"
    keeps: ClassVar[tuple[str, ...]] = ("repair_layout", "keep_layout", "input_format")

    def lower(self, program: Any, metadata: Mapping[str, str]) -> Any:
        return program

    def write(self, lowered: Any, path: Path, metadata: Mapping[str, str]) -> None:
        import torch

        torch.export.save(lowered, path, extra_files=dict(metadata))

    def load(self, path: Path) -> Loaded:
        import torch

        module = torch.export.load(path).module()
        return lambda args, kwargs: module(*args, **kwargs)

    def metadata(self, path: Path) -> dict[str, str]:
        import torch

        from prepare.export.records import METADATA

        extra = dict.fromkeys(METADATA, "")
        torch.export.load(path, extra_files=extra)
        return extra
