"""The folder in which the step compile keeps what it compiled."""

import os
import subprocess
import sys

import pytest

from paths import ROOT
from prepare.app.cli import main as cli
from prepare.errors import FileError
from prepare.steps import compile as compiling


def test_a_cache_restores_the_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "before"))
    with compiling.cache(tmp_path / "code"):
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "code")
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "before")


def test_a_cache_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match="cannot be made: .*; choose another folder"):
        with compiling.cache(tmp_path / "file" / "code"):
            pass


def test_a_job_says_where_its_code_is(tmp_path):
    words = [
        "model._target_=sample_nets.Net",
        "input.shape=[2,3,16,16]",
        "bench=none",
        "flow=none",
    ]
    step = "+steps.compile={backend: eager}"
    folder = tmp_path / "code"
    assert (
        cli.run([*words, step, f"compile.save={folder}", f"hydra.run.dir={tmp_path / 'run'}"]) == 0
    )
    assert folder.is_dir()
    assert str(folder) in (tmp_path / "run" / "result.json").read_text()


COLD = """
import sys, torch
from torch import nn
from prepare.pipeline import Pipeline
from prepare.steps import compile
torch.set_num_threads(1)
net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval()
Pipeline.from_config({"compile": {}}).apply(net)
with compile.cache(sys.argv[1]), torch.no_grad():
    net(torch.ones(1, 3, 8, 8))
counters = torch._dynamo.utils.counters["inductor"]
print(counters["fxgraph_cache_hit"], counters["fxgraph_cache_miss"])
"""


@pytest.mark.slow
def test_a_later_process_with_the_folder_compiles_nothing(tmp_path):
    command = [sys.executable, "-c", COLD, str(tmp_path)]
    ran = [
        subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout.strip()
        for _ in range(2)
    ]
    assert ran == ["0 1", "1 0"]
