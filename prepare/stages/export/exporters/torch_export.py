"""Export a program of torch.export, which runs in torch without the model's code."""

from __future__ import annotations

import os
import zipfile
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

from prepare.core.utils.process_state import PROCESS_STATE
from prepare.errors import RefusedError
from prepare.stages.export.exporter import Exporter, Loaded, register
from prepare.stages.export.records import METADATA

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

_ONLY_TENSORS = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"


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
        module = _load(path).module()
        return lambda args, kwargs: module(*args, **kwargs)

    @classmethod
    def code(cls, artefact: str, inputs: str) -> str:
        return (
            "import torch\n\n"
            f"model = torch.export.load({artefact}).module()\n"
            f"output = model(*{inputs})"
        )

    def metadata(self, path: Path) -> dict[str, str]:
        extra = dict.fromkeys(METADATA, "")
        _load(path, extra_files=extra)
        return extra


def _load(path: Path, **options: Any) -> Any:
    """Load a program, and refuse pickles in it that hold more than tensors: they could run any code."""
    import torch
    from torch.export.pt2_archive.constants import OPAQUE_OBJ_FILENAME_PREFIX

    with zipfile.ZipFile(path) as archive:
        names = [name.rpartition("/")[2] for name in archive.namelist()]
    if any(name.startswith(OPAQUE_OBJ_FILENAME_PREFIX) for name in names):
        raise RefusedError(path.name, "holds a pickled object", "do not load it")
    with _only_tensors():
        return torch.export.load(path, **options)


@contextmanager
def _only_tensors() -> Iterator[None]:
    """Let torch.load take nothing but tensors; torch.export.load would fall back to any object."""
    with PROCESS_STATE:
        before = os.environ.get(_ONLY_TENSORS)
        os.environ[_ONLY_TENSORS] = "1"
        try:
            yield
        finally:
            if before is None:
                del os.environ[_ONLY_TENSORS]
            else:
                os.environ[_ONLY_TENSORS] = before
