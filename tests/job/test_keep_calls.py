"""A run gives keep_layout the calls that the flow of its example names, and writes them into its recipe."""

import pytest

from prepare.app.cli import main as cli
from prepare.app.job import build_model, run_stages
from prepare.core.model.module_tree import CopyError
from prepare.pipeline import Pipeline
from prepare.stages.flow import Flow

FORMAT = ("memfmt=channels_last_3d", "bench=none", "+steps.keep_layout={}")


def job(folder, target="chunked", *overrides):
    shape = "input.shape=[2,3,2,6,7]"
    given = [f"model._target_=keeping_nets.{target}", shape, f"hydra.run.dir={folder}", *FORMAT]
    with pytest.raises(SystemExit) as ended:
        cli.main([*given, *overrides])
    return ended.value.code


def calls(folder):
    return Pipeline.load(folder / "recipe.yaml").steps["keep_layout"].calls


def test_a_run_writes_the_calls_of_its_flow_into_the_recipe(tmp_path, capsys):
    assert job(tmp_path, "chunked", "verify=short") == 0
    assert len(calls(tmp_path)) == 2
    assert all(name.startswith("CausalConv.forward: ") for name in calls(tmp_path))
    assert Flow.load(tmp_path / "flow.json").summary["breaks"] == 0
    assert Flow.load(tmp_path / "flow_before.json").summary["breaks"] > 0
    assert "right " in capsys.readouterr().out


def test_the_flows_name_the_line_of_each_place_that_is_kept_now(tmp_path):
    assert job(tmp_path, "chunked", "verify=none") == 0
    before, after = (Flow.load(tmp_path / name) for name in ("flow_before.json", "flow.json"))
    lines = {event.source for event in before.events}
    assert lines
    assert not lines & {event.source for event in after.events}


def test_a_run_names_a_model_that_the_step_does_not_help(tmp_path, capsys):
    assert job(tmp_path, "Purposeful", "verify=none") == 0
    assert calls(tmp_path) == ()
    out = " ".join(capsys.readouterr().out.split())
    expected = "steps.keep_layout.calls: no call of the model's own code is replaced"
    assert f"{expected}: none of 1 break can be removed" in out


def test_a_run_without_a_break_replaces_nothing(tmp_path, capsys):
    assert job(tmp_path, "convolution", "verify=none") == 0
    assert calls(tmp_path) == ()
    assert "nothing loses" in " ".join(capsys.readouterr().out.split())


def uncopied(*_):
    raise CopyError("it is one of a kind")


@pytest.mark.slow
@pytest.mark.parametrize("reason", ["the flow cannot be predicted", "the model holds", "of a kind"])
def test_a_run_that_cannot_choose_says_what_it_does(reason, tmp_path, capsys, monkeypatch):
    if "holds" in reason:
        monkeypatch.setattr(build_model, "LARGEST", 10)
    if "kind" in reason:
        monkeypatch.setattr(run_stages, "copy_or_build", uncopied)
    target = "branching" if "predicted" in reason else "chunked"
    assert job(tmp_path, target, "verify=none") == 0
    assert calls(tmp_path) == "auto"
    out = " ".join(capsys.readouterr().out.split())
    assert "steps.keep_layout.calls: auto" in out
    assert reason in out


def test_a_run_says_which_steps_remove_how_many_breaks(tmp_path, capsys):
    assert job(tmp_path, "chunked", "verify=none", "~steps.keep_layout") == 0
    flow = Flow.load(tmp_path / "flow.json")
    assert flow.remedy.steps == ("keep_layout",)
    out = " ".join(capsys.readouterr().out.split())
    assert f"add +steps.keep_layout={{}} (keeps the layout at {flow.summary['breaks']} of" in out
