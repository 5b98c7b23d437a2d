"""A prepared model that was undone is exported like an unprepared one: the outputs are those of the prepared model."""

import pytest
import torch
from torch import nn

from prepare.pipeline import Pipeline

OF_WEIGHTS = {"conv3d_memory_format": {}, "input_format": {}}
STEPS = {
    "backends": {}, "compile": {"backend": "aot_eager"}, "device": {"device": "cpu"}, "eval_mode": {}, "fuse_conv_bn": {},
    "fuse_inference": {}, "keep_layout": {}, "repair_layout": {}, "rewrite_conv": {"force": True, "pointwise": ["last"]},
}  # fmt: skip


class Split(nn.Module):
    """A network with what each structure step changes."""

    def __init__(self):
        super().__init__()
        self.first, self.batch = nn.Conv3d(3, 8, 3, padding=1), nn.BatchNorm3d(8)
        self.instance, self.last = nn.InstanceNorm3d(8, affine=True), nn.Conv3d(8, 4, 1)

    def forward(self, x):
        halves = self.instance(self.batch(self.first(x))).chunk(2, dim=1)
        return self.last(torch.cat([part.contiguous() for part in reversed(halves)], dim=1))


def by_torch(model, x):
    return torch.export.export(model, (x,)).module()(x)


def by_onnx(model, x):
    for package in ("onnxscript", "onnxruntime"):
        pytest.importorskip(package)
    return torch.onnx.export(model, (x,), dynamo=True, verbose=False)(x)[0]


def by_openvino(model, x):
    openvino = pytest.importorskip("openvino")
    converted = openvino.convert_model(model, example_input=x)
    compiled = openvino.compile_model(converted, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return torch.from_numpy(compiled(x.numpy())[0])


OTHERS = [pytest.param(each, marks=pytest.mark.slow) for each in (by_onnx, by_openvino)]


@pytest.mark.filterwarnings("ignore")  # of the converters
@pytest.mark.parametrize("exported", [by_torch, *OTHERS])
@pytest.mark.parametrize("name", [*STEPS, "all"])
def test_an_undone_model_is_exported_with_equal_outputs(name, exported):
    model, x = Split().eval(), torch.randn(2, 3, 4, 6, 6)
    steps = STEPS if name == "all" else {name: STEPS[name]}
    pipeline = Pipeline.from_config(OF_WEIGHTS | steps)
    pipeline.apply(model, example=x, strict=False, known_issues="ignore")
    x = pipeline.format(x)
    with torch.no_grad():
        wanted = model(x)
        pipeline.undo(model)
        output = exported(model, x)
    torch.testing.assert_close(output, wanted, rtol=1e-4, atol=1e-5)


def test_every_step_of_ours_is_tried_but_two_that_cast_and_stride():
    from prepare.registry import STEPS as REGISTERED

    ours = {name for name, cls in REGISTERED.items() if cls.__module__.startswith("prepare.")}
    assert ours - {*STEPS, *OF_WEIGHTS} == {"conv2d_memory_format", "half"}
