"""The training code on a page: it runs for the recipe beside it, with a model in training mode."""

import json

import pytest
import torch

from prepare.app.cli import main as cli
from prepare.app.report.training_code import recipe_call, training_code
from sample_nets import wrong_in_training

WRONG = ("model._target_=sample_nets.wrong_in_training", "memfmt=channels_last")
SMALL = ("input.shape=[1,3,16,16]", "bench=none", "verify=none", "flow=none")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::prepare.errors.KnownIssueWarning")
@pytest.mark.parametrize("words", [[], ["+steps.repair_layout={}"], ["precision=half"]], ids=str)
def test_the_code_of_a_page_runs_in_training_mode(words, tmp_path, monkeypatch):
    assert cli.run([*WRONG, *SMALL, *words, f"hydra.run.dir={tmp_path}"]) == 0
    monkeypatch.chdir(tmp_path)
    code = training_code(json.loads((tmp_path / "plan.json").read_text()))
    page = (tmp_path / "report.html").read_text().replace("&#34;", '"')
    assert code in page
    model = wrong_in_training().train()
    names = {"model": model, "batch": torch.randn(1, 3, 16, 16)}
    with torch.no_grad():
        exec(code, names)
    assert names["model"] is model
    assert ('"repair_layout": {}' in code) == (not words)
    assert model.training != ("precision=half" in words)


def test_a_plan_of_an_older_version_gives_the_plain_code():
    assert "pipeline.apply(model) " in training_code({"steps": {}})
    assert "pipeline.apply(model) " in training_code(None)


def test_the_code_of_a_job_under_autocast_runs_its_forward_in_one():
    names = {"model": torch.nn.Linear(2, 2), "batch": torch.ones(1, 2)}
    code = training_code({"steps": {"device": {"device": "cpu"}}}, "bfloat16")
    assert 'torch.autocast("cpu", torch.bfloat16)' in code
    lines = [line for line in code.splitlines() if "Pipeline" not in line and "apply" not in line]
    exec("\n".join(lines).replace("pipeline.format(batch)", "batch"), names)
    assert names["output"].dtype is torch.bfloat16


def test_one_call_trains_with_repairs_or_not_at_all():
    repairs = {"repair_layout": {}}
    assert recipe_call("r.yaml", repairs=repairs, errors=True) == (
        'Pipeline.load("r.yaml", steps={"repair_layout": {}}).apply(model)'
    )
    only = recipe_call("r.yaml", repairs=None, errors=True)
    assert only == 'Pipeline.load("r.yaml").apply(model.eval())'
