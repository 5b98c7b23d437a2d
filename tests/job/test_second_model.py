"""Test jobs, verifications and tunings of models that cannot be copied: they are built a second time."""

import pytest
import torch
from torch import nn

from prepare.app.cli import main as cli
from prepare.core.model.module_tree import CopyError, copy_or_build
from prepare.pipeline import Pipeline
from prepare.stages.verify import verify
from sample_nets import RefersToItself

RECIPE = {"conv2d_memory_format": {}}
BATCH = torch.ones(1, 3, 12, 12)


def job(name, folder, *overrides):
    overrides = [
        f"model._target_=sample_nets.{name}",
        "memfmt=channels_last",
        "input.shape=[1,3,12,12]",
        f"hydra.run.dir={folder}",
        *overrides,
    ]
    with pytest.raises(SystemExit) as ended:
        cli.main(overrides)
    return ended.value.code


def built():
    torch.manual_seed(0)
    return RefersToItself()


def test_two_models_that_differ_are_not_compared_and_said_once(tmp_path, capsys):
    assert job("never_twice", tmp_path) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert out.count("cannot be copied") == 1
    assert "convs.1.bias differs" in out
    assert "seed=" in out
    assert "second model" in out


def test_verify_takes_a_function_that_builds_the_reference():
    model = Pipeline.from_config(RECIPE).apply(built().eval())
    assert verify(lambda: built().eval(), model, BATCH).status == "pass"


@pytest.mark.parametrize(
    "other", [nn.Identity(), nn.Sequential(nn.Conv2d(3, 4, 3))], ids=["class", "tensors"]
)
def test_a_second_model_that_differs_is_refused(other):
    with pytest.raises(CopyError, match="differs in a second model"):
        copy_or_build(built(), lambda: other)
