"""TensorRT: an exporter that says what it lacks on this machine."""

from __future__ import annotations

from importlib.util import find_spec
from typing import ClassVar

from prepare.errors import Problem
from prepare.export.exporter import Exporter, register


@register("tensorrt")
class TensorRt(Exporter):
    """An engine of TensorRT. It is not built here: the message names what it lacks, and another way."""

    suffix: ClassVar[str] = ".engine"
    packages: ClassVar[tuple[str, ...]] = ("tensorrt", "torch_tensorrt")

    def missing(self) -> Problem:
        from torch import cuda

        lacks = [f"the package {name}" for name in self.packages if find_spec(name) is None]
        lacks += [] if cuda.is_available() else ["a GPU of NVIDIA"]
        lacks += ["a test on such a machine, without which prepare builds no engine"]
        remedy = "choose export=onnx; TensorRT's trtexec reads that file on its own machine"
        return Problem("export", f"tensorrt lacks {', '.join(lacks)}", remedy)
