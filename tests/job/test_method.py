"""`model.method=decode`: every stage of a run calls that method, and all names are the model's."""

import html

import pytest
import torch
from safetensors.torch import load_file

import prepare
from coder_nets import Coder
from prepare.app.cli.main import run as command
from prepare.audit import Audit
from prepare.errors import ConfigError
from prepare.pipeline import Pipeline

CODER = ("model._target_=coder_nets.Coder", "input.shape=[2,8,3,6,7]", "memfmt=channels_last_3d")
STEPS = ("+steps.repair_layout={}", "+steps.keep_layout={}")
NAMES = ["encoder.weight", "encoder.bias", "decoder.weight", "decoder.bias"]
CALL = "Coder.decode: latents.repeat(1, 1, 1, 1, 2)"


@pytest.fixture
def go(tmp_path, monkeypatch, capsys):
    """Run the command line in an empty folder; return the folder of the run, and the output."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")

    def run(*words, code=0, method="decode", bench="none"):
        own = (f"model.method={method}", f"bench={bench}", "hydra.run.dir=run", "overwrite=true")
        assert command([*CODER, *own, *words]) == code
        said = capsys.readouterr()
        return tmp_path / "run", " ".join((said.out + said.err).split())

    return run


def test_a_run_prepares_verifies_and_saves_the_model_by_its_own_names(go, tmp_path):
    folder, said = go(*STEPS, f"save={tmp_path / 'weights.safetensors'}")
    assert said.startswith("Coder.decode on cpu, channels_last_3d")
    page = html.unescape((folder / "report.html").read_text())
    assert "[2, 8, 3, 6, 7] float32 -> [2, 3, 1, 4, 12] float32" in page
    assert "right yes" in said
    assert {f"{row.module}.{row.tensor}" for row in Audit.load(folder / "audit.json").rows} == set(
        NAMES
    )
    recipe = Pipeline.load(folder / "recipe.yaml")
    assert recipe.steps["keep_layout"].calls == (CALL,)
    assert sorted(load_file(tmp_path / "weights.safetensors")) == sorted(NAMES)
    whole = recipe.apply(Coder().eval())
    assert whole(torch.randn(2, 3, 3, 6, 7)).is_contiguous(memory_format=torch.channels_last_3d)


def test_a_method_that_does_not_exist_is_named_with_the_nearest(go):
    _, said = go(method="decoed", code=2)
    wrong = "model.method: Coder has no method 'decoed'; did you mean 'decode'? methods: decode, encode, forward"
    assert wrong in said
    assert "has no method 'training'" in go(method="training", code=2)[1]


def test_a_wrong_method_in_python_is_named():
    with pytest.raises(
        ConfigError, match="method: Coder has no method 'encod'; did you mean 'encode'"
    ):
        prepare.calling(Coder(), "encod")
