"""Export a model of OpenVINO, and run it with OpenVINO on the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from prepare.core.utils.telemetry import switch_off_telemetry
from prepare.export.exporter import Exporter, Loaded, register

_PLACE = "prepare"


@register("openvino")
class OpenVino(Exporter):
    """A model of OpenVINO (.xml, with its weights in .bin). It chooses layouts itself, as ONNX does."""

    suffix: ClassVar[str] = ".xml"
    packages: ClassVar[tuple[str, ...]] = ("openvino",)

    def lower(self, program: Any, metadata: Mapping[str, str]) -> Any:
        switch_off_telemetry()
        import openvino

        lowered = openvino.convert_model(program)
        # It forgets sizes that cannot change, and would take inputs of other sizes.
        shapes = zip(lowered.inputs, _shapes(program), strict=True)
        lowered.reshape({port: openvino.PartialShape(shape) for port, shape in shapes})
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

        # Without the hint it computes in bfloat16 if the processor supports it.
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

    def metadata(self, path: Path) -> dict[str, str]:
        import openvino

        from prepare.export.records import METADATA

        model = openvino.Core().read_model(str(path))
        places = {key: [_PLACE, key.partition(".")[0]] for key in METADATA}
        return {
            key: str(model.get_rt_info(place).value)
            for key, place in places.items()
            if model.has_rt_info(place)
        }


def _shapes(program: Any) -> list[list[int]]:
    """Return the shape of each tensor that the program takes, -1 for a size that may change."""
    names = set(program.graph_signature.user_inputs)
    values = [
        n.meta["val"] for n in program.graph.nodes if n.op == "placeholder" and n.name in names
    ]
    tensors = [value for value in values if hasattr(value, "shape")]
    return [[size if isinstance(size, int) else -1 for size in each.shape] for each in tensors]
