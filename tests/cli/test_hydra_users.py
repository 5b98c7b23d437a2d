"""Features that users of Hydra expect: own option files, experiments, flags in any position."""

import json
import logging
from pathlib import Path

import pytest

from prepare.app.cli import main as cli

FAST = ("verify=none", "bench=none", "flow=none", "device=cpu")
NET = "model._target_=sample_nets.Net"
MODEL = """
# @package _global_
model: {_target_: sample_nets.Net, width: 2}
input: {shape: [1, 3, 8, 8]}
"""
EXPERIMENT = """
# @package _global_
defaults:
  - override /memfmt: channels_last
  - override /precision: bfloat16
seed: 7
"""


@pytest.fixture
def conf(tmp_path, monkeypatch):
    """A folder of own option files, in an empty current folder."""
    for path, text in {"model/mynet.yaml": MODEL, "experiment/fast.yaml": EXPERIMENT}.items():
        (tmp_path / "conf" / path).parent.mkdir(parents=True)
        (tmp_path / "conf" / path).write_text(text)
    monkeypatch.chdir(tmp_path)
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield tmp_path / "conf"
    root.handlers[:] = handlers  # --info logs to the terminal
    root.setLevel(level)


def test_own_models_and_experiments_are_chosen_by_name(conf, capsys):
    words = ["--config-dir", str(conf), "model=mynet", "+experiment=fast", "hydra.run.dir=run"]
    assert cli.run([*words, *FAST]) == 0, capsys.readouterr().err
    assert "cpu, channels_last" in capsys.readouterr().out
    job = json.loads((conf.parent / "run" / "job.json").read_text())
    assert (job["choices"]["model"], job["choices"]["precision"]) == ("mynet", "bfloat16")


@pytest.mark.parametrize("name", ["report.html", "result.json"])
def test_files_that_no_run_has_written_are_not_replaced(conf, capsys, name):
    (conf.parent / "run").mkdir()
    (conf.parent / "run" / name).write_text("mine")
    assert cli.run([NET, "hydra.run.dir=run", *FAST]) == 2
    said = capsys.readouterr().err
    assert said.startswith("hydra.run.dir: ")
    assert name in said
    assert "overwrite=true" in said
    assert [path.name for path in (conf.parent / "run").iterdir()] == [name]
    assert (conf.parent / "run" / name).read_text() == "mine"
    # As a run that was killed leaves it.
    assert cli.run([NET, "hydra.run.dir=run", "overwrite=true", *FAST]) == 0


def test_an_earlier_run_is_replaced_only_with_overwrite(conf, capsys):
    words = [NET, "hydra.run.dir=run", *FAST]
    files = lambda: {path: path.read_bytes() for path in Path("run").rglob("*.*") if path.is_file()}  # noqa: E731
    assert cli.run([*words, "hydra.job.chdir=true"]) == 0
    # The folder is named although the run was in it.
    assert f"details   {conf.parent / 'run' / 'report.html'}\n" in capsys.readouterr().out
    before = files()
    for more in ([], ["hydra.run.dir=${hydra:job.name}", "hydra.job.name=run"]):
        assert cli.run([*words, "seed=3", *more]) == 2
        said = capsys.readouterr().err
        assert said.startswith("hydra.run.dir: ")
        assert "overwrite=true" in said
    after = files()
    assert {path for path in before if before[path] != after[path]} <= {
        *Path("run/.hydra").iterdir()
    }
    assert cli.run([*words, "seed=3", "overwrite=true"]) == 0
    assert "seed=3" in (conf.parent / "run" / "job.json").read_text()


def test_hydra_keeps_its_files_without_secrets(conf, monkeypatch):
    monkeypatch.setenv("TOKEN", "7123987")
    secret = 'seed="${oc.decode:${oc.env:TOKEN}}"'
    assert cli.run([NET, "hydra.run.dir=run", secret, *FAST]) == 0
    folder = conf.parent / "run" / ".hydra"
    assert {path.name for path in folder.iterdir()} == {
        "config.yaml",
        "hydra.yaml",
        "overrides.yaml",
    }
    texts = [path.read_text() for path in folder.iterdir()]
    assert "${oc.env:TOKEN}" in "".join(texts)
    assert "7123987" not in "".join(texts)
