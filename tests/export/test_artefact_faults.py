"""Faults that are planted in artefacts, as a converter or a later change may make them: all are found."""

import re
import shutil

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from prepare.errors import FileError
from prepare.export import check, export
from prepare.pipeline import Pipeline

slow = pytest.mark.slow


class Decoder(nn.Module):
    """A small network with what converters get wrong: norms, resizing, concatenation, axes, padding."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.GroupNorm(2, 8)
        self.down = nn.Conv2d(8, 8, 3, stride=2, padding=1)
        self.instance = nn.InstanceNorm2d(8, affine=True)
        self.batch = nn.BatchNorm2d(8)
        self.last = nn.Conv2d(16, 4, 1)
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        skip = torch.relu(self.norm(self.first(x)))
        y = F.leaky_relu(self.batch(self.instance(self.down(skip))), 0.1)
        y = F.interpolate(y, scale_factor=2, mode="bilinear", align_corners=False)
        y = self.last(torch.cat([skip, F.elu(y)], 1))
        y = self.linear(y.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return torch.softmax(y, 1), F.max_pool2d(y, 2)


def network():
    torch.manual_seed(0)
    model = Decoder().eval()
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            tensor.data.add_(0.3 * torch.rand_like(tensor))
    return model


def batch():
    return torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))


# --------------------------------------------------------- quick: an artefact that is the model's own pickle


def changed_weight(model):
    model.last.weight.data[0, 0] *= 1.01


def changed_epsilon(model):
    model.norm.eps = 1e-3


def swapped_channels(model):
    model.first.weight.data[[0, 1]] = model.first.weight.data[[1, 0]]


def other_axes(model):
    model.down.weight.data = model.down.weight.data.transpose(2, 3).contiguous()


def lost_cast(kept):
    kept["dtype"] = torch.float32


@pytest.fixture
def stub(tmp_path, in_process):
    """Export to the stub, plant a fault, and check the artefact again."""

    def run(plant=None, plant_in_file=None):
        steps = {"half": {"dtype": "bfloat16"}} if plant_in_file else {"conv2d_memory_format": {}}
        pipeline = Pipeline.from_config({**steps, "input_format": {}})
        done = export(network(), batch(), to="Stub", folder=tmp_path, pipeline=pipeline)
        assert done.status == "pass"
        kept = torch.load(tmp_path / done.artefact, weights_only=False)
        if plant:
            plant(kept["model"])
        if plant_in_file:
            plant_in_file(kept)
        torch.save(kept, tmp_path / done.artefact)
        return check(tmp_path / done.artefact, network(), batch(), to="Stub", pipeline=pipeline)

    return run


@pytest.mark.parametrize("plant", [changed_weight, changed_epsilon, swapped_channels, other_axes])
def test_a_planted_fault_is_found(stub, plant):
    found = stub(plant)
    assert found.status == "fail"
    assert "compare: contiguous input of batch 2: wrong" in found.reason


def test_a_missing_cast_is_found(stub):
    found = stub(plant_in_file=lost_cast)
    assert found.status == "fail"
    assert "refused: RuntimeError" in found.reason


def test_an_artefact_without_a_fault_passes_again(stub):
    found = stub()
    assert found.status == "pass"
    assert [stage.name for stage in found.stages] == ["load", "compare"]


def test_an_artefact_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(FileError, match="none.onnx: does not exist; give the file of an artefact"):
        check(tmp_path / "none.onnx", network(), batch(), to="Stub")


@pytest.mark.parametrize("name", ["../evil", "/tmp/evil", "a/../../evil", "..\\evil", "C:\\evil"])
def test_an_archive_with_a_path_out_of_it_is_not_loaded(tmp_path, in_process, name):
    import zipfile

    path = tmp_path / "model.pt2"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(name, "x")
    found = check(path, network(), batch(), to="Stub")
    assert found.status == "refused"
    assert "holds a file outside of its folder" in found.reason
    assert {each.name for each in tmp_path.iterdir()} == {"model.pt2"}


# ------------------------------------------------------------------------------ slow: the real formats


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Return the folder of an artefact, which is exported once for each format."""
    folders = {}

    def folder_of(to):
        if to not in folders:
            folder = tmp_path_factory.mktemp(to)
            done = export(network(), batch(), to=to, folder=folder)
            assert (done.status, done.reason) == ("pass", "")
            folders[to] = folder
        return folders[to]

    return folder_of


@pytest.fixture
def copied(made, tmp_path, in_process):
    def copy(to):
        pytest.importorskip({"torch_export": "torch", "onnx": "onnxruntime"}.get(to, to))
        return shutil.copytree(made(to), tmp_path / to)

    return copy


def initializer(model, part, change):
    """Change the first initializer whose name holds `part`."""
    from onnx import numpy_helper

    item = next(each for each in model.graph.initializer if part in each.name)
    values = numpy_helper.to_array(item).copy()
    item.CopyFrom(numpy_helper.from_array(change(values), item.name))


def scaled(values):
    values.flat[0] *= 1.05
    return values


def negated(values):
    values[0] = -values[0]
    return values


def rolled(values):
    import numpy as np

    return np.ascontiguousarray(np.roll(values, 1, 0))


def turned(values):
    import numpy as np

    return np.ascontiguousarray(np.swapaxes(values, -1, -2))


def attribute(model, kind, name, value):
    node = next(each for each in model.graph.node if each.op_type == kind)
    old = [each for each in node.attribute if each.name == name]
    for each in old:
        node.attribute.remove(each)
    from onnx import helper

    node.attribute.append(helper.make_attribute(name, value))


def reversed_inputs(model, kind):
    node = next(each for each in model.graph.node if each.op_type == kind)
    names = list(node.input)
    del node.input[:]
    node.input.extend(reversed(names))


def bypassed(model, kind):
    """Take a node out: whatever reads its output reads its input."""
    node = next(each for each in model.graph.node if each.op_type == kind)
    for other in model.graph.node:
        for index, name in enumerate(other.input):
            if name == node.output[0]:
                other.input[index] = node.input[0]
    model.graph.node.remove(node)


ONNX_FAULTS = {
    "a weight of the first convolution": lambda m: initializer(m, "first.weight", scaled),
    "a bias of the first convolution": lambda m: initializer(m, "first.bias", scaled),
    "a weight of the strided convolution": lambda m: initializer(m, "down.weight", scaled),
    "a weight of the last convolution": lambda m: initializer(m, "last.weight", scaled),
    "a bias of the last convolution": lambda m: initializer(m, "last.bias", scaled),
    "a bias of the linear layer": lambda m: initializer(m, "linear.bias", scaled),
    "a sign of the first convolution": lambda m: initializer(m, "first.weight", negated),
    "a sign of the last convolution": lambda m: initializer(m, "last.weight", negated),
    "filters in another order": lambda m: initializer(m, "first.weight", rolled),
    "filters of the last one in another order": lambda m: initializer(m, "last.weight", rolled),
    "kernels with swapped axes": lambda m: initializer(m, "first.weight", turned),
    "strided kernels with swapped axes": lambda m: initializer(m, "down.weight", turned),
    "padding at the wrong side": lambda m: attribute(m, "Conv", "pads", [2, 1, 0, 1]),
    "a slope of the leaky ReLU": lambda m: attribute(m, "LeakyRelu", "alpha", 0.11),
    "an alpha of the ELU": lambda m: attribute(m, "Elu", "alpha", 1.05),
    "an epsilon of a norm": lambda m: attribute(m, "InstanceNormalization", "epsilon", 1e-3),
    "a resize to the nearest": lambda m: attribute(m, "Resize", "mode", "nearest"),
    "a resize with other coordinates": lambda m: attribute(
        m, "Resize", "coordinate_transformation_mode", "asymmetric"
    ),
    "a resize with aligned corners": lambda m: attribute(
        m, "Resize", "coordinate_transformation_mode", "align_corners"
    ),
    "a concatenation in another order": lambda m: reversed_inputs(m, "Concat"),
    "a softmax over another axis": lambda m: attribute(m, "Softmax", "axis", 2),
    "an axis order": lambda m: attribute(m, "Transpose", "perm", [0, 3, 2, 1]),
    "a missing ReLU": lambda m: bypassed(m, "Relu"),
    "a missing ELU": lambda m: bypassed(m, "Elu"),
    "a pooling with another stride": lambda m: attribute(m, "MaxPool", "kernel_shape", [1, 1]),
}


@slow
@pytest.mark.parametrize("name", ONNX_FAULTS)
def test_a_fault_in_an_onnx_model_is_found(copied, name):
    folder = copied("onnx")
    import onnx

    model = onnx.load(folder / "model.onnx")
    ONNX_FAULTS[name](model)
    onnx.save(model, folder / "model.onnx")
    found = check(folder / "model.onnx", network(), batch(), to="onnx")
    assert found.status == "fail", found.checks


PROGRAM_FAULTS = {
    "a weight": lambda p: p.state_dict["first.weight"].data[0].mul_(1.05),
    "a statistic of a batch norm": lambda p: p.state_dict["batch.running_var"].mul_(1.02),
    "an epsilon": lambda p: argument(p, "group_norm", 4, 1e-3),
    "a slope": lambda p: argument(p, "leaky_relu", 1, 0.11),
    "a softmax over another axis": lambda p: argument(p, "softmax", 1, 2),
    "an axis order": lambda p: argument(p, "permute", 1, [0, 3, 2, 1]),
}


def argument(program, kind, index, value):
    node = next(n for n in program.graph.nodes if n.op == "call_function" and kind in str(n.target))
    args = list(node.args)
    args[index] = value
    node.args = tuple(args)
    program.graph_module.recompile()


@slow
@pytest.mark.parametrize("name", PROGRAM_FAULTS)
@pytest.mark.filterwarnings("ignore")
def test_a_fault_in_a_program_of_torch_is_found(copied, name):
    path = copied("torch_export") / "model.pt2"
    program = torch.export.load(path)
    PROGRAM_FAULTS[name](program)
    torch.export.save(program, path)
    assert check(path, network(), batch(), to="torch_export").status == "fail"


def changed_constant(folder):
    """Change a weight of the linear layer, wherever the file has it."""
    values = network().linear.weight.detach().numpy().tobytes()
    content = (folder / "model.bin").read_bytes()
    assert values[:16] in content
    at = content.index(values[:16])
    new = torch.tensor([5.0, -5.0]).numpy().tobytes()
    (folder / "model.bin").write_bytes(content[:at] + new + content[at + len(new) :])


def replaced(old, new):
    def change(folder):
        path = folder / "model.xml"
        text = path.read_text()
        assert re.search(old, text)
        path.write_text(re.sub(old, new, text))

    return change


OPENVINO_FAULTS = {
    "a weight": changed_constant,
    "an epsilon": replaced('epsilon="[^"]+"', 'epsilon="0.01"'),
    "a resize to the nearest": replaced('mode="linear_onnx"', 'mode="nearest"'),
}


@slow
@pytest.mark.parametrize("name", OPENVINO_FAULTS)
def test_a_fault_in_a_model_of_openvino_is_found(copied, name):
    folder = copied("openvino")
    OPENVINO_FAULTS[name](folder)
    assert check(folder / "model.xml", network(), batch(), to="openvino").status == "fail"


@slow
@pytest.mark.parametrize("to", ["torch_export", "onnx", "openvino"])
def test_hostile_names_write_nothing_outside(tmp_path, to):
    pytest.importorskip({"torch_export": "torch", "onnx": "onnxruntime"}.get(to, to))
    model = network()
    model.__class__ = type("../../evil", (Decoder,), {"__module__": __name__})
    model._modules["../../evil/first"] = model._modules.pop("first")
    vars(model)["first"] = model._modules["../../evil/first"]
    before = set(tmp_path.parent.iterdir())
    done = export(model, batch(), to=to, folder=tmp_path / "out")
    assert done.status in ("pass", "refused"), done.reason
    assert {path.name for path in tmp_path.iterdir()} == {"out"}
    assert set(tmp_path.parent.iterdir()) == before


@slow
@pytest.mark.parametrize("to", ["torch_export", "onnx", "openvino", "aoti"])
def test_a_prepared_network_is_exported_with_its_recipe(tmp_path, to):
    pytest.importorskip(
        {"torch_export": "torch", "onnx": "onnxruntime", "aoti": "torch"}.get(to, to)
    )
    steps = {"conv2d_memory_format": {}, "repair_layout": {"force": True}, "input_format": {}}
    pipeline = Pipeline.from_config(steps)
    done = export(network(), batch(), to=to, folder=tmp_path, pipeline=pipeline, dynamic=[0])
    assert (done.status, done.reason) == ("pass", "")
    assert done.recipe_inside
    assert done.contract.layouts["contiguous"] == "right"
    assert done.contract.layouts["channels_last"] == ("refused" if to == "aoti" else "right")


@slow
def test_aoti_without_checks_answers_other_strides_wrongly(tmp_path):
    done = export(network(), batch(), to="aoti", folder=tmp_path, check_inputs=False)
    assert done.status == "fail"
    assert done.contract.layouts["contiguous"] == "right"
    assert done.contract.layouts["channels_last"] == "wrong"
