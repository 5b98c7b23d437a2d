"""Faults that are planted in artefacts, as a converter or a later change may make them: all are found."""

import zipfile

import pytest
import torch

from export_nets import batch, network
from prepare.errors import FileError
from prepare.pipeline import Pipeline
from prepare.stages.export import check, export


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
    path = tmp_path / "model.pt2"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(name, "x")
    found = check(path, network(), batch(), to="Stub")
    assert found.status == "refused"
    assert "holds a file outside of its folder" in found.reason
    assert {each.name for each in tmp_path.iterdir()} == {"model.pt2"}
