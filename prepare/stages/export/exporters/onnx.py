"""Export an ONNX model, and run it with ONNX Runtime on the CPU."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar

from prepare.stages.export.exporter import Exporter, Loaded, register


def _check_opset(opset: int) -> None:
    if not 18 <= opset <= 26:
        raise ValueError(f"{opset} is not an opset", "give one from 18 to 26, or null")


@register("onnx")
class Onnx(Exporter):
    """An ONNX model (.onnx). ONNX has no memory formats, so repairs and rewritten calls stay behind."""

    suffix: ClassVar[str] = ".onnx"
    beside: ClassVar[tuple[str, ...]] = (".onnx.data",)
    packages: ClassVar[tuple[str, ...]] = ("onnx", "onnxscript", "onnxruntime")
    only_tensors: ClassVar[bool] = True

    opset: Annotated[int, "a whole number", _check_opset] | None = None
    """The version of ONNX's operators; null lets torch choose."""

    def lower(self, program: Any, metadata: Mapping[str, str]) -> Any:
        import torch

        # They warn of every package that is not installed, and of an output that is a constant.
        for name in ("torch.onnx", "onnx_ir"):
            logging.getLogger(name).setLevel(logging.ERROR)
        lowered = torch.onnx.export(program, dynamo=True, opset_version=self.opset, verbose=False)
        assert lowered is not None  # torch returns None only where it writes the file itself
        lowered.model.metadata_props.update(metadata)
        return lowered

    def write(self, lowered: Any, path: Path, metadata: Mapping[str, str]) -> None:
        lowered.save(str(path))

    def load(self, path: Path) -> Loaded:
        import onnxruntime
        import torch

        from prepare.core.forward.nested import tensors_in

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.log_severity_level = 3
        session = onnxruntime.InferenceSession(
            str(path), options, providers=["CPUExecutionProvider"]
        )
        names = [each.name for each in session.get_inputs()]

        def call(args: tuple, kwargs: dict[str, Any]) -> Any:
            tensors = [tensor.detach().numpy() for tensor in tensors_in([*args, *kwargs.values()])]
            outputs = session.run(None, dict(zip(names, tensors, strict=True)))
            return [torch.from_numpy(output) for output in outputs]

        return call

    @classmethod
    def code(cls, artefact: str, inputs: str) -> str:
        return (
            "import onnxruntime\n\n"
            f'session = onnxruntime.InferenceSession({artefact}, providers=["CPUExecutionProvider"])\n'
            "names = [each.name for each in session.get_inputs()]\n"
            f"arrays = [each.numpy() for each in {inputs}]\n"
            "outputs = session.run(None, dict(zip(names, arrays)))"
        )

    def metadata(self, path: Path) -> dict[str, str]:
        import onnx

        model = onnx.load(path, load_external_data=False)
        return {each.key: each.value for each in model.metadata_props}
