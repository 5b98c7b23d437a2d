"""Export a model of OpenVINO, and run it with OpenVINO on the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from prepare.core.utils.packages import switch_off_telemetry
from prepare.stages.export.exporter import Exporter, Loaded, register
from prepare.stages.export.records import METADATA

_PLACE = "prepare"


@register("openvino")
class OpenVino(Exporter):
    """A model of OpenVINO (.xml, with its weights in .bin). It chooses layouts itself, as ONNX does."""

    suffix: ClassVar[str] = ".xml"
    beside: ClassVar[tuple[str, ...]] = (".bin",)
    packages: ClassVar[tuple[str, ...]] = ("openvino",)
    only_tensors: ClassVar[bool] = True

    def lower(self, program: Any, metadata: Mapping[str, str]) -> Any:
        switch_off_telemetry()
        import openvino

        lowered = openvino.convert_model(program)
        values = _inputs(program)
        if len(values) == len(lowered.inputs):
            # An argument that is not a tensor is an input as well, which nothing reads.
            for parameter, value in zip(lowered.get_parameters(), values, strict=True):
                if not hasattr(value, "shape"):
                    lowered.remove_parameter(parameter)
        # OpenVINO forgets sizes that cannot change, and would take inputs of other sizes.
        shapes = [_shape(value) for value in values if hasattr(value, "shape")]
        ports = zip(lowered.inputs, shapes, strict=True)
        lowered.reshape({port: openvino.PartialShape(shape) for port, shape in ports})
        for key, value in metadata.items():
            lowered.set_rt_info(value, [_PLACE, key.partition(".")[0]])
        return lowered

    def write(self, lowered: Any, path: Path, metadata: Mapping[str, str]) -> None:
        import openvino

        openvino.save_model(lowered, str(path), compress_to_fp16=False)

    def load(self, path: Path) -> Loaded:
        switch_off_telemetry()
        import openvino
        import torch

        from prepare.core.forward.nested import tensors_in

        # Without the hint OpenVINO computes in bfloat16 if the processor supports it.
        config = {
            "INFERENCE_PRECISION_HINT": "f32",
            "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        }
        compiled = openvino.Core().compile_model(str(path), "CPU", config)

        def call(args: tuple, kwargs: dict[str, Any]) -> Any:
            tensors = [tensor.detach().numpy() for tensor in tensors_in([*args, *kwargs.values()])]
            outputs = compiled(tensors, share_inputs=False, share_outputs=False)
            return [torch.from_numpy(outputs[index]) for index in range(len(compiled.outputs))]

        return call

    @classmethod
    def code(cls, artefact: str, inputs: str) -> str:
        # As in `load`.
        return (
            "import openvino\n\n"
            'config = {"INFERENCE_PRECISION_HINT": "f32"}\n'
            f'compiled = openvino.Core().compile_model({artefact}, "CPU", config)\n'
            f"outputs = compiled([each.numpy() for each in {inputs}])"
        )

    def metadata(self, path: Path) -> dict[str, str]:
        import openvino

        model = openvino.Core().read_model(str(path))
        places = {key: [_PLACE, key.partition(".")[0]] for key in METADATA}
        return {
            key: str(model.get_rt_info(place).value)
            for key, place in places.items()
            if model.has_rt_info(place)
        }


def _inputs(program: Any) -> list[Any]:
    """Return what the program takes: tensors, and constants such as a flag."""
    from torch.export.graph_signature import InputKind

    nodes = [node for node in program.graph.nodes if node.op == "placeholder"]
    specs = zip(nodes, program.graph_signature.input_specs, strict=True)
    return [node.meta["val"] for node, spec in specs if spec.kind is InputKind.USER_INPUT]


def _shape(value: Any) -> list[int]:
    """Return the shape of a tensor, with -1 for a size that may change."""
    return [size if isinstance(size, int) else -1 for size in value.shape]
