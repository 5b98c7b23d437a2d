"""The folder in which the step compile keeps what it compiled."""

import os

from prepare.app.cli import main as cli
from prepare.steps import compile as compiling


def test_a_cache_restores_the_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "before"))
    with compiling.cache(tmp_path / "code"):
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "code")
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "before")


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
