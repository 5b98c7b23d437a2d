"""Features that users of Hydra expect: own option files, experiments, flags in any position."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from paths import RUN
from prepare.app.cli import hydra_app
from prepare.app.cli import main as cli
from prepare.core.utils import files
from prepare.core.utils.files import hold_folder
from prepare.errors import FileError

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


@pytest.mark.parametrize("flag", ["--config-dir", "-cd"])
@pytest.mark.parametrize("mode", [(), ("-m",)], ids=["run", "sweep"])
def test_a_misspelt_own_option_finds_its_name(conf, capsys, flag, mode):
    assert cli.run(["model=mynte", *mode, flag, str(conf)]) == 2
    line = capsys.readouterr().err
    assert "did you mean 'mynet'?" in line
    assert "custom, mynet, resnet2d" in line


@pytest.mark.parametrize(
    "words",
    [("--info", "searchpath", "model=unet2d"), ("model=unet2d", "--info", "searchpath")],
    ids=["first", "last"],
)
def test_info_may_be_in_any_position(conf, capsys, words):
    assert cli.run([*words]) == 0
    assert "provider" in capsys.readouterr().out.lower()


def test_info_without_a_word_does_not_take_the_next_override(conf, capsys):
    assert cli.run(["--info", "model=unet2d"]) == 0
    assert "unet2d" in capsys.readouterr().out


@pytest.mark.slow
def test_a_table_of_a_read_only_folder_is_printed(conf, capsys, monkeypatch):
    assert cli.run(["-m", NET, "seed=1,2", "hydra.sweep.dir=swept", *FAST]) == 0
    capsys.readouterr()

    def refuse(path, *_):
        raise FileError(os.fspath(path), "cannot be written: Read-only file system")

    monkeypatch.setattr(files, "write_bytes", refuse)
    monkeypatch.setattr(files, "write_text", refuse)
    monkeypatch.setattr("prepare.core.utils.json_records.write_text", refuse)
    assert cli.run(["summary", "swept"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[1].startswith("0 ")
    assert out[-1].startswith("not written: swept/summary.json: cannot be written: Read-only")


def test_a_second_run_in_a_folder_at_the_same_time_is_refused(conf, capsys):
    (conf.parent / "run").mkdir()
    with hold_folder(conf.parent / "run") as claimed:
        assert claimed
        assert cli.run([NET, "hydra.run.dir=run", *FAST]) == 2
    line = "hydra.run.dir: another run is writing to run; wait for it, or choose another folder\n"
    assert capsys.readouterr().err == line
    assert list((conf.parent / "run").iterdir()) == []
    assert cli.run([NET, "hydra.run.dir=run", *FAST]) == 0


@pytest.mark.parametrize("made", [True, False], ids=["empty", "missing"])
def test_a_run_holds_its_folder_before_hydra_writes(conf, capsys, monkeypatch, made):
    if made:
        (conf.parent / "run").mkdir()
    others = []
    checked = hydra_app.Checks.on_run_start

    def check(self, config, **kwargs):
        checked(self, config, **kwargs)
        with hold_folder(conf.parent / "run") as claimed:
            others.append(claimed)

    monkeypatch.setattr(hydra_app.Checks, "on_run_start", check)
    assert cli.run([NET, "hydra.run.dir=run", *FAST]) == 0
    assert others == [False]
    assert (conf.parent / "run" / ".hydra" / "config.yaml").is_file()
    with hold_folder(conf.parent / "run") as claimed:
        assert claimed  # released at the end


def test_bash_completes_run_py(conf):
    script = f"""
        cp {RUN} run.py; eval "$(python run.py -sc install=bash)"
        COMP_LINE="python run.py memfmt=ch"; COMP_POINT=${{#COMP_LINE}}; COMP_CWORD=2
        hydra_bash_completion; echo "${{COMPREPLY[@]}}"
    """
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = os.environ | {"PATH": path, "PYTHONPATH": str(RUN.parent)}
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, env=env, check=False
    )
    assert done.stdout.split() == ["memfmt=channels_last", "memfmt=channels_last_3d"], done.stderr


@pytest.fixture
def completed(monkeypatch, capsys):
    """Return the words that a shell offers for a line."""

    def query(line, shell="bash"):
        monkeypatch.setenv("COMP_LINE", line)
        assert cli.run(["-sc", f"query={shell}"]) == 0
        out, err = capsys.readouterr()
        assert err == ""
        return out.split()

    return query


@pytest.mark.parametrize("shell", ["bash", "fish", "zsh"])
def test_hydra_completes_groups_options_and_keys(completed, shell):
    assert completed("prepare model=unet2d memfmt=ch", shell) == [
        "memfmt=channels_last",
        "memfmt=channels_last_3d",
    ]
    assert "verify=" in completed("prepare ver", shell)


def test_help_lists_the_launchers(capsys):
    assert cli.run(["--help", "all"]) == 0
    line = "hydra/launcher: basic, joblib, ray, submitit_local, submitit_slurm"
    assert line in capsys.readouterr().out


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
