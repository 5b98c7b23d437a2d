"""The folder in which the step compile keeps what it compiled."""

import os
import subprocess
import sys

import pytest
import torch

from paths import ROOT
from prepare.app.cli import main as cli
from prepare.errors import FileError
from prepare.steps import compile as compiling


def test_a_cache_counts_graphs_and_restores_the_folder(tmp_path, monkeypatch):
    counters = torch._dynamo.utils.counters["inductor"]
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "before"))
    monkeypatch.setitem(counters, "fxgraph_cache_hit", 3)
    monkeypatch.setitem(counters, "fxgraph_cache_miss", 0)
    with compiling.cache(tmp_path / "code") as cache:
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "code")
        monkeypatch.setitem(counters, "fxgraph_cache_hit", 5)
        monkeypatch.setitem(counters, "fxgraph_cache_miss", 1)
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "before")
    assert (cache.read, cache.compiled, str(cache)) == (2, 1, "2 graphs read, 1 compiled")


def test_a_cache_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match="cannot be made: .*; choose another folder"):
        with compiling.cache(tmp_path / "file" / "code"):
            pass


def test_a_job_counts_what_it_compiled_and_read(tmp_path, capsys):
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
    shown = " ".join(capsys.readouterr().out.split())
    assert "0 graphs read, 0 compiled" in shown


COLD = """
import sys, torch
from torch import nn
from prepare.pipeline import Pipeline
from prepare.steps import compile
torch.set_num_threads(1)
net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval()
Pipeline.from_config({"compile": {}}).apply(net)
with compile.cache(sys.argv[1]) as cache, torch.no_grad():
    net(torch.ones(1, 3, 8, 8))
print(cache.read, cache.compiled)
"""


@pytest.mark.slow
def test_a_later_process_with_the_folder_compiles_nothing(tmp_path):
    command = [sys.executable, "-c", COLD, str(tmp_path)]
    ran = [
        subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout.strip()
        for _ in range(2)
    ]
    assert ran == ["0 1", "1 0"]
