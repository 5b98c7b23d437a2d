"""Tuning from the command line, and on several ranks."""

import json
import os
import re
import subprocess
import sys

import pytest

from paths import PYTHONPATH
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


RANK = """
import sys
import torch
import torch.distributed as dist
from prepare.stages import tune as module
from prepare.errors import RefusedError
from prepare.stages.tune.tune_model import _Tuner
from sample_nets import small

rank, file, wrong = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "wrong"


def stopped(self):
    raise KeyboardInterrupt("stopped by Ctrl-C")


if sys.argv[3] == "stopped":
    _Tuner.run = stopped
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
if rank:
    _Tuner.run = None  # only rank 0 may measure
torch.manual_seed(rank)
try:
    found = module.tune(small(), torch.ones(2, 2 if wrong else 3, 12, 12), budget=0.5)
    print(found.winner, found.seconds, sorted(found.recipe))
except (Exception, KeyboardInterrupt) as error:
    print(type(error).__name__, error)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "how", ["stopped", *(pytest.param(how, marks=pytest.mark.slow) for how in ("right", "wrong"))]
)
def test_rank_0_decides_for_all_ranks(tmp_path, how):
    command = [sys.executable, "-c", RANK]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store"), how], stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": PYTHONPATH},
        )
        for rank in (0, 1)
    ]  # fmt: skip
    said = [rank.communicate(timeout=120) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    first, second = (out for out, _ in said)
    if how == "right":
        assert first == second != ""
    elif how == "stopped":
        assert first.startswith("KeyboardInterrupt stopped by Ctrl-C")
        assert second.startswith("KeyboardInterrupt rank 0 was stopped: ")
    else:
        assert first.startswith("ModelError the unprepared model: forward of 0")
        assert second.startswith("RefusedError rank 0: the unprepared model: forward of 0")
