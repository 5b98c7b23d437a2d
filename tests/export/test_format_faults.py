"""Faults that are planted in artefacts of the real formats: all are found."""

import re

import pytest
import torch

from export_nets import batch, network
from prepare.stages.export import check

slow = pytest.mark.slow


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
