"""Models that take dicts: nested inputs, or a function that returns the batch."""

import sys

import pytest
import torch
from torch import nn

from prepare.app.cli import main as cli


class TakesDict(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, batch):
        return {"out": self.conv(batch["image"]) * batch["scale"][0]}


def batch():
    return ({"image": torch.randn(2, 3, 8, 8), "scale": [torch.rand(1)]},)


def raises():
    raise ValueError("no data here")


HERE = ("model._target_=test_dict_inputs.TakesDict", "memfmt=channels_last", "bench=none")


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "test_dict_inputs", sys.modules[__name__])

    def run(*words):
        code = cli.run([*HERE, *words])
        return code, capsys.readouterr()

    return run


NESTED = "input.args=[{image:{shape:[2,3,8,8]},scale:[{shape:[1]}]}]"


@pytest.mark.parametrize("word", [NESTED, "input.factory=test_dict_inputs.batch"])
def test_a_dict_is_given_by_command_and_verified(word, run):
    code, said = run(word)
    assert code == 0, said.err
    assert "1 of 1" in said.out
    assert "right     yes" in said.out


def test_a_factory_that_is_not_there_or_raises_is_named(run):
    code, said = run("input.factory=test_dict_inputs.bacth")
    assert code == 2
    assert "input.factory: test_dict_inputs has no 'bacth'; did you mean" in said.err
    code, said = run("input.factory=test_dict_inputs.raises")
    assert code == 1
    assert "test_dict_inputs.raises: " in said.err
    assert "ValueError: no" in said.err
