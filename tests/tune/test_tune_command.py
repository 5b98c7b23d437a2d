"""Tuning from the command line, and on several ranks."""

import json
import re

import pytest

from prepare import recipe
from prepare.app.cli import main as cli
from prepare.pipeline import Pipeline
from prepare.stages.tune import Tuning
from sample_nets import small

TUNE = ("model._target_=sample_nets.small", "input.shape=[2,3,12,12]", "device=cpu")


@pytest.fixture
def go(tmp_path, monkeypatch, capsys):
    """Run task=tune in an empty folder, in this process; return the folder and the output."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")

    def run(*argv, code=0):
        own = ("task=tune", "hydra.run.dir=run", "overwrite=true")
        assert cli.run([*TUNE, *own, *argv]) == code
        return tmp_path / "run", capsys.readouterr()

    return run


def test_the_winner_is_applied_audited_and_recorded(timed, go):
    timed.update({"channels_last + input": 0.05})
    folder, said = go("tune.budget=100")
    found = Tuning.load(folder / "tune.json")
    assert found.winner == "channels_last + input"
    assert recipe.load(folder / "recipe.yaml") == found.recipe
    assert (
        json.loads((folder / "audit.json").read_text())["summary"]["convolutions"]["converted"] == 2
    )
    assert json.loads((folder / "verify.json").read_text())["status"] == "pass"
    assert "2 of 2" in said.out
    assert re.search(r"faster    2\.0x faster, .* with channels_last \+ input", said.out)
    page = (folder / "report.html").read_text()
    assert '<section id="tune"' in page
    assert all(row.name in page for row in found.rows)
    assert "dropped after" in page
    assert not (folder / "bench.json").exists()  # the tuning has timed it
    assert "timed" not in json.loads((folder / "result.json").read_text())["figures"]
    again = Pipeline.load(folder / "recipe.yaml")
    assert again.to_config() == found.recipe
    assert not again.plan(again.apply(small().eval()))


def test_tuning_needs_an_example_input(go):
    _, said = go("input.shape=null", code=2)
    assert "input.shape=[...]" in said.err
