"""Export a program of ExecuTorch, the runtime for phones and small devices."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from prepare.core.utils.packages import quiet_torchao
from prepare.core.utils.text import first_line
from prepare.stages.export.exporter import Exporter, Loaded, register
from prepare.stages.export.records import METADATA

if TYPE_CHECKING:
    from torch import nn

    from prepare.core.forward.call import Call


def _check_largest(largest: int) -> None:
    if largest < 2:
        raise ValueError(f"{largest} leaves nothing to change", "give 2 or more, or null")


@register("executorch")
class ExecuTorch(Exporter):
    """A program of ExecuTorch (.pte), with XNNPACK for the operators that it has.

    The runtime reads a channels-last input as if it were contiguous (pytorch/executorch #21837), and
    refuses other strides. So an export fails unless its contract requires contiguous inputs.
    """

    suffix: ClassVar[str] = ".pte"
    packages: ClassVar[tuple[str, ...]] = ("executorch",)
    extra: ClassVar[str] = "executorch"
    contiguous_weights: ClassVar[bool] = True
    layout_remedy: ClassVar[str] = (
        "give contiguous inputs only, and promise it with export.require_contiguous=true"
    )

    backend: Literal["xnnpack"] | None = "xnnpack"
    """The library that computes what it can; null leaves all to ExecuTorch's own kernels."""
    require_contiguous: bool = False
    """The contract requires contiguous inputs; answers to others are recorded, and are not a failure."""
    largest: Annotated[int, "a whole number", _check_largest] | None = None
    """The largest size of a dimension that may change; null is twice that of the example."""

    @property
    def requires_contiguous(self) -> bool:
        return self.require_contiguous

    def capture(self, model: nn.Module, call: Call) -> Any:
        from prepare.stages.export.exportable import capture

        # The runtime reserves memory for the largest sizes.
        return capture(model, call, self.dynamic, largest=lambda size: self.largest or 2 * size)

    def lower(self, program: Any, metadata: Mapping[str, str]) -> Any:
        quiet_torchao()
        from executorch.exir import to_edge_transform_and_lower

        partitioners = []
        if self.backend == "xnnpack":
            from executorch.backends.xnnpack.partition.xnnpack_partitioner import (
                XnnpackPartitioner,
            )

            partitioners.append(XnnpackPartitioner())
        edge = to_edge_transform_and_lower(
            program, partitioner=partitioners, constant_methods=dict(metadata)
        )
        return edge.to_executorch()

    def write(self, lowered: Any, path: Path, metadata: Mapping[str, str]) -> None:
        with path.open("wb") as file:
            lowered.write_to_file(file)

    def load(self, path: Path) -> Loaded:
        from torch.utils._pytree import tree_leaves

        method = _program(path).load_method("forward")

        def call(args: tuple, kwargs: dict[str, Any]) -> Any:
            inputs = tree_leaves((args, kwargs))
            try:
                return method.execute(inputs)
            except RuntimeError as error:
                if reason := _logged(lambda: method.execute(inputs)):
                    raise RuntimeError(f"{error}: {reason}") from error
                raise

        return call

    def metadata(self, path: Path) -> dict[str, str]:
        program = _program(path)
        known = [key for key in METADATA if key in program.method_names]
        return {key: program.load_method(key).execute([])[0] for key in known}


def _logged(function: Callable[[], Any]) -> str:
    """Return the first line that the runtime writes to stderr when it fails; its errors say only a number."""
    with tempfile.TemporaryFile() as file:
        kept = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            with suppress(RuntimeError):
                function()
        finally:
            os.dup2(kept, 2)
            os.close(kept)
        file.seek(0)
        return first_line(file.read().decode(errors="replace").strip())


def _program(path: Path) -> Any:
    from executorch.runtime import Runtime

    return Runtime.get().load_program(path)
