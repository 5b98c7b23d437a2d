"""Test the switches of torch's backends: set, idempotent, restored, and refused if they contradict."""

import pytest
import torch
from torch import nn

from prepare.app.cli import main as cli
from prepare.core.forward.torch_state import SWITCHES, saved_switches
from prepare.errors import ConfigError, StepError
from prepare.pipeline import Pipeline
from prepare.steps import backends
from prepare.steps.compile import Compile

EVERY = {
    "cudnn_benchmark": True,
    "cudnn_deterministic": False,
    "tf32": True,
    "matmul_precision": "medium",
}
SET = {name.replace("tf32", "cudnn_tf32"): value for name, value in EVERY.items()}


@pytest.fixture(autouse=True)
def restored():
    restore = saved_switches()
    yield
    restore()
    backends._restore.clear()


def pipeline(**options):
    return Pipeline.from_config({"backends": options})


def values():
    return {name: SWITCHES[name].read() for name in SET}


def test_every_switch_is_set_and_then_there_is_nothing_to_do():
    model = nn.Linear(2, 2)
    assert pipeline(**EVERY).plan(model)
    pipeline(**EVERY).apply(model)
    assert values() == SET
    assert torch.backends.cudnn.benchmark
    assert torch.get_float32_matmul_precision() == "medium"
    assert not pipeline(**EVERY).plan(model)


def test_undo_restores_what_was_before_the_first_step():
    before = values()
    pipeline(**EVERY).apply(nn.Linear(2, 2))
    pipeline(matmul_precision="medium").apply(nn.Linear(2, 2))
    backends.undo()
    assert values() == before


def test_a_failed_apply_restores_the_switches(monkeypatch):
    before = values()

    def fails(self, model):
        assert values() == SET
        raise StepError("steps.compile", "raised")

    monkeypatch.setattr(Compile, "act", fails)
    both = Pipeline.from_config({"backends": EVERY, "compile": {"backend": "eager"}})
    with pytest.raises(StepError):
        both.apply(nn.Linear(2, 2))
    assert values() == before


def test_drift_of_a_switch_is_found():
    prepared = pipeline(cudnn_benchmark=True)
    model = prepared.apply(nn.Linear(2, 2))
    assert prepared.check(model) == []
    torch.backends.cudnn.benchmark = False
    assert prepared.check(model)


def test_a_job_restores_the_switches_at_its_end(tmp_path):
    before = values()
    words = ["model._target_=sample_nets.Net", "+steps.backends={tf32: true}", "task=prepare"]
    assert cli.run([*words, f"hydra.run.dir={tmp_path}"]) == 0
    assert values() == before
    assert "tf32: true" in (tmp_path / "recipe.yaml").read_text()


@pytest.mark.parametrize(
    ("options", "where"),
    [
        ({"cudnn_benchmark": True, "cudnn_deterministic": True}, "cudnn_benchmark"),
        ({"tf32": False, "matmul_precision": "high"}, "matmul_precision"),
        ({"tf32": True, "matmul_precision": "highest"}, "matmul_precision"),
    ],
)
def test_switches_that_contradict_each_other_are_refused(options, where):
    with pytest.raises(ConfigError) as raised:
        pipeline(**options)
    (problem,) = raised.value.problems
    assert problem.where == f"steps.backends.{where}"
    assert "drop" in problem.remedy
