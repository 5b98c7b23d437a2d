"""Weights that a job loads, and those that it saves."""

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

from checkpoint_nets import small
from prepare.app.cli import main as cli
from prepare.checkpoint import save
from prepare.models.unet import UNet2d

RUN = ["model=unet2d", "device=cpu", "bench=none", "flow=none", "memfmt=channels_last"]
RUN += ["input.shape=[1,1,16,16]", "model.width=4", "model.depth=2"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("verify", ["none", "short"])
def test_a_job_loads_weights_first_and_saves_the_prepared_ones(here, verify):
    assert cli.run([*RUN, "verify=none", "seed=1", "save=first.safetensors"]) == 0
    argv = [*RUN, f"verify={verify}", "precision=bfloat16", "hydra.run.dir=out"]
    assert cli.run([*argv, "weights=first.safetensors", "save=second.safetensors"]) == 0
    page = (here / "out" / "report.html").read_text()
    assert "weights: those of first.safetensors" in page
    assert "weights: written to second.safetensors" in page
    first = safetensors.torch.load_file("first.safetensors")
    second = safetensors.torch.load_file("second.safetensors")
    weight = "encoder.0.conv1.weight"
    assert torch.equal(second[weight], first[weight].bfloat16())
    audit = json.loads((here / "out" / "audit.json").read_text())
    rows = {f"{row['module']}.{row['tensor']}": row for row in audit["rows"]}
    assert rows[weight]["before"] == {"stride": [9, 9, 3, 1], "dtype": "float32", "device": "cpu"}
    assert rows[weight]["status"] == "converted"
    assert rows["encoder.0.norm1.weight"]["status"] == "skipped"


def test_a_file_that_does_not_fit_fails_the_job_in_one_line(here, capsys):
    save(small(), "other.safetensors")
    assert cli.run([*RUN, "weights=other.safetensors"]) == 1
    said = capsys.readouterr().err
    assert "other.safetensors, encoder.0.conv1.weight: is not in the file" in said
    save(nn.ModuleDict({"module": UNet2d(width=4, depth=2)}), "wrapped.safetensors")
    assert cli.run([*RUN, "verify=none", "weights=wrapped.safetensors"]) == 1
    assert "which those of the model lack; add strip='module.'\n" in capsys.readouterr().err
    assert cli.run([*RUN, "verify=none", "weights=wrapped.safetensors", "strip=module."]) == 0
    assert cli.run([*RUN, "strip=module."]) == 2
    assert capsys.readouterr().err.endswith(
        "strip: there is no file of weights; add weights=FILE\n"
    )
    Path("text.pt").write_text("hello")
    assert cli.run([*RUN, "weights=text.pt"]) == 1
    assert "text.pt: cannot be read" in capsys.readouterr().err


def test_saving_weights_never_overwrites_a_file(here, capsys):
    Path("there.safetensors").write_text("mine")
    for argv, where, remedy in (
        (["save=there.safetensors"], "save: there.safetensors", "another name"),
        (["save=nowhere/w.safetensors"], "save: nowhere/w.safetensors", "no folder nowhere"),
        (["save=w.txt"], "save: w.txt", "allowed: .safetensors"),
        (["save=w.safetensors", "task=plan"], "save: task=plan", ""),
        (["weights=ther.safetensors"], "weights: ther.safetensors", "did you mean there.safetensors?"),
        (["-m", "seed=1,2", "save=w.safetensors"], "save: save=w.safetensors", "single runs"),
    ):  # fmt: skip
        assert cli.run([*RUN, *argv]) == 2
        said = capsys.readouterr().err
        assert said.startswith(where), argv
        assert remedy in said
    assert [each.name for each in here.iterdir()] == ["there.safetensors"]
    assert Path("there.safetensors").read_text() == "mine"
