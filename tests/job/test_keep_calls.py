"""A run gives keep_layout the calls that the flow of its example names, and writes them into its recipe."""

import pytest

from prepare.app.cli import main as cli
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


def test_a_run_without_a_break_replaces_nothing(tmp_path, capsys):
    assert job(tmp_path, "convolution", "verify=none") == 0
    assert calls(tmp_path) == ()
    assert "nothing loses" in " ".join(capsys.readouterr().out.split())
