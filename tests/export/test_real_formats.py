"""Exports to the real formats: prepared networks, rewritten calls, hostile names and pickles."""

import io
import pickle
import zipfile

import pytest
import torch
from torch import nn

from export_nets import Decoder, batch, needs, network
from keeping_nets import chunked, video
from prepare.core.forward.example_input import Example
from prepare.pipeline import Pipeline
from prepare.stages.export import check, export

slow = pytest.mark.slow


class Hostile:
    """A pickle that makes a file when it is loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@slow
@pytest.mark.parametrize("entry", ["sample_inputs/", "constants/opaque_obj_0"])
def test_a_hostile_pickle_in_a_program_is_not_run(copied, tmp_path, entry):
    path = copied("torch_export") / "model.pt2"
    buffer = io.BytesIO()
    if entry.endswith("/"):
        torch.save(Hostile(tmp_path / "evil"), buffer)
    else:
        buffer.write(pickle.dumps(Hostile(tmp_path / "evil")))
    with zipfile.ZipFile(path) as old:
        files = {name: old.read(name) for name in old.namelist()}
    root = next(iter(files)).partition("/")[0]
    names = [name for name in files if entry in name] or [f"{root}/data/{entry}"]
    with zipfile.ZipFile(path, "w") as new:
        for name, content in (files | dict.fromkeys(names, buffer.getvalue())).items():
            new.writestr(name, content)
    found = check(path, network(), batch(), to="torch_export")
    assert (found.status, found.stages[0].name) == ("refused", "load")
    assert not (tmp_path / "evil").exists()


@slow
@pytest.mark.parametrize("to", ["torch_export", "onnx", "openvino"])
def test_hostile_names_write_nothing_outside(tmp_path, to):
    needs(to)
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
    needs(to)
    steps = {"conv2d_memory_format": {}, "repair_layout": {"force": True}, "input_format": {}}
    pipeline = Pipeline.from_config(steps)
    done = export(network(), batch(), to=to, folder=tmp_path, pipeline=pipeline, dynamic=[0])
    assert (done.status, done.reason) == ("pass", "")
    assert done.recipe_inside
    assert done.contract.layouts["contiguous"] == "right"
    assert done.contract.layouts["channels_last"] == ("refused" if to == "aoti" else "right")


class Flagged(nn.Module):
    """Take a flag and a tensor by name, as networks of diffusers do."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3)

    def forward(self, x, scale, return_dict=True):
        y = self.first(x) * scale
        return {"sample": y} if return_dict else (y,)


@slow
@pytest.mark.parametrize("to", ["torch_export", "onnx", "openvino"])
def test_arguments_that_are_not_tensors_go_along(tmp_path, to):
    needs(to)
    given = Example((batch(),), {"scale": torch.tensor([2.0]), "return_dict": False})
    done = export(Flagged().eval(), given, to=to, folder=tmp_path)
    assert (done.status, done.reason) == ("pass", "")


@slow
@pytest.mark.parametrize("to", ["torch_export", "onnx", "openvino"])
def test_rewritten_calls_are_exported_or_taken_out(tmp_path, to):
    needs(to)
    steps = {"conv3d_memory_format": {}, "keep_layout": {}, "input_format": {}}
    pipeline = Pipeline.from_config(steps)
    done = export(chunked(), video(2), to=to, folder=tmp_path, pipeline=pipeline)
    assert (done.status, done.reason) == ("pass", "")
    taken = {item.step for item in done.taken_out}
    assert ("keep_layout" in taken) == (to != "torch_export")


@slow
def test_aoti_without_checks_answers_other_strides_wrongly(tmp_path):
    done = export(network(), batch(), to="aoti", folder=tmp_path, check_inputs=False)
    assert done.status == "fail"
    assert done.contract.layouts["contiguous"] == "right"
    assert done.contract.layouts["channels_last"] == "wrong"
