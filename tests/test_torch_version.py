"""A torch that is too old is refused in one line."""

import subprocess
import sys

from prepare.app.cli import main as cli
from prepare.core.utils import packages

OLD = "import torch; torch.__version__ = type(torch.__version__)('2.4.1'); "
SAID = "prepare needs torch 2.5 or newer, and this is 2.4.1; pip install -U torch"


def run(code, folder):
    command = [sys.executable, "-c", OLD + code]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_a_sweep_says_it_before_it_starts(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(packages.metadata, "version", lambda name: "2.4.1")
    assert cli.run(["--multirun", "model=unet2d", f"hydra.sweep.dir={tmp_path / 'sweep'}"]) == 2
    assert capsys.readouterr().err == f"{SAID}\n"
    assert not (tmp_path / "sweep").exists()


def test_an_import_raises_a_configuration_error(tmp_path):
    done = run("from prepare.pipeline import Pipeline", tmp_path)
    assert done.stderr.splitlines()[-1] == f"prepare.errors.ConfigError: {SAID}"
