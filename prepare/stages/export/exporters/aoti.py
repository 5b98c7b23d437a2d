"""Export a library that torch's ahead-of-time compiler makes, for this kind of machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from prepare.errors import Problem
from prepare.stages.export.exporter import Exporter, Loaded, register
from prepare.stages.export.records import METADATA

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_CHECKS = "AOTI_RUNTIME_CHECK_INPUTS"


@register("aoti")
class Aoti(Exporter):
    """A compiled library in a package (.pt2), for this kind of processor and this version of torch.

    It computes with the strides of the example, whatever the strides of its input; it compares the two only
    under `AOTI_RUNTIME_CHECK_INPUTS=1`.
    """

    suffix: ClassVar[str] = ".pt2"
    keeps: ClassVar[tuple[str, ...]] = ("input_format",)
    layout_remedy: ClassVar[str] = (
        "set export.check_inputs=true, and run it with AOTI_RUNTIME_CHECK_INPUTS=1"
    )

    check_inputs: bool = True
    """Run it with the comparison of strides, and say so in its contract."""

    @property
    def environment(self) -> dict[str, str]:
        return {_CHECKS: "1"} if self.check_inputs else {}

    def missing(self) -> Problem | None:
        from prepare.steps.compile import missing_tool

        tool = missing_tool("cpu")
        return Problem("export", f"aoti needs {tool}", "install it") if tool else None

    def lower(self, program: Any, metadata: Mapping[str, str]) -> Any:
        import torch

        args, kwargs = program.example_inputs
        options = {
            "aot_inductor.package": True,
            "aot_inductor.metadata": dict(metadata),
            # With the checks of inputs, a dynamic size of 1 would be refused.
            "aot_inductor.check_lowerbound": False,
        }
        module = program.module(check_guards=False)
        return torch._inductor.aot_compile(module, args, kwargs, options=options)

    def write(self, lowered: Any, path: Path, metadata: Mapping[str, str]) -> None:
        from torch._inductor.package import package_aoti

        package_aoti(str(path), lowered)

    def load(self, path: Path) -> Loaded:
        import torch

        model = torch._inductor.aoti_load_package(str(path))
        return lambda args, kwargs: model(*args, **kwargs)

    @classmethod
    def code(cls, artefact: str, inputs: str) -> str:
        return (
            "import torch\n\n"
            f"model = torch._inductor.aoti_load_package({artefact})\n"
            f"output = model(*{inputs})"
        )

    def metadata(self, path: Path) -> dict[str, str]:
        import torch

        stored = torch._inductor.aoti_load_package(str(path)).get_metadata()
        return {key: stored[key] for key in METADATA if key in stored}
