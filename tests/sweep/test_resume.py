"""Tests of stopping and resuming: a stopped sweep loses nothing, and resumes where it was."""

import os
import sys
from importlib import metadata
from pathlib import Path

import pytest

from prepare.app.cli import main as cli
from prepare.app.sweep.manifest import identity_of
from prepare.core.utils.files import hold_folder
from sweeps import NET, QUICK, Ended

pytestmark = pytest.mark.skipif(os.name != "posix", reason="asks for fork and signals of POSIX")

# Logs each build of a network, and fails as long as a file "NAME fails" exists.
NOTED = """
import os, time
from pathlib import Path
from torch import nn

def net(name="", slow=0.0):
    with Path("built").open("a") as file:
        file.write(f"{name}\\n")
    time.sleep(slow)
    if Path(f"{name} fails").exists():
        raise ValueError("for now")
    return nn.Conv2d(3, 4, 3)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """Return the current folder, which contains the module `noted`."""
    (tmp_path / "noted.py").write_text(NOTED)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("noted", None)


@pytest.fixture
def sweep(folder, capsys):
    """Run a sweep over names of networks, always in the same folder."""

    def run(names: str, *words: str) -> Ended:
        words = ("model._target_=noted.net", f"+model.name={names}", *QUICK, *words)
        code = cli.run(["--multirun", "hydra.sweep.dir=swept", *words])
        return Ended(code, *capsys.readouterr(), folder / "swept")

    return run


def built(folder: Path) -> list[str]:
    """Return the names of the networks that were built since the last call."""
    path = folder / "built"
    names = path.read_text().split("\n")[:-1] if path.exists() else []
    path.unlink(missing_ok=True)
    return names


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


# ------------------------------------------------------------------------------- what is done again


def test_resume_repeats_only_jobs_that_did_not_end_well(sweep, folder):
    (folder / "b fails").touch()
    first = sweep("a,b,c")
    assert (first.code, first.statuses) == (1, ["ok", "failed", "ok"])
    stray = first.folder / first.rows[1]["folder"] / ".0123456789abcdef.prepare-tmp"
    stray.touch()
    before = contents(first.folder / first.rows[0]["folder"])
    assert built(folder) == ["a", "b", "c"]
    (folder / "b fails").unlink()
    second = sweep("a,b,c", "resume=true")
    assert (second.code, second.statuses) == (0, ["ok", "ok", "ok"])
    assert built(folder) == ["b"]
    assert not stray.exists()
    assert contents(first.folder / first.rows[0]["folder"]) == before
    assert "kept 2" in second.err
    third = sweep("a,b,c", "resume=true")
    assert (third.code, third.statuses, built(folder)) == (0, ["ok", "ok", "ok"], [])
    assert third.rows == second.rows


def test_another_sweep_in_the_folder_is_refused(sweep, folder):
    first = sweep("a,b")
    before = (folder / "swept" / "sweep.json").read_bytes()
    built(folder)
    ran = sweep("a")
    assert (ran.code, built(folder)) == (2, [])
    (line,) = ran.err.splitlines()
    assert line.startswith(f"hydra.sweep.dir: {folder / 'swept'} holds")
    assert (folder / "swept" / "sweep.json").read_bytes() == before
    assert ran.rows == first.rows


def test_a_job_runs_again_if_its_identity_has_changed(sweep, folder, monkeypatch):
    (folder / "own_plugin.py").write_text("")
    words = ["plugins=[own_plugin]"]
    another = "# another\n"
    changes = {
        "nothing": lambda: None,
        "option": lambda: words.append("seed=1"),
        "code": lambda: (folder / "noted.py").write_text(NOTED + another),
        "plugin": lambda: (folder / "own_plugin.py").write_text(another),
        "version": lambda: monkeypatch.setattr(
            "prepare.app.sweep.manifest.version_of", lambda package: "another"
        ),
    }
    sweep("a", *words)
    built(folder)
    for name, change in changes.items():
        change()
        sweep("a", *words, "resume=true")
        assert built(folder) == ["a"] * (name != "nothing"), name


def test_an_identity_covers_the_packages_of_every_plugin(monkeypatch):
    class Distribution:
        name = "a-package"

    def identity(*groups):
        points = [metadata.EntryPoint("own", "own:Own", group) for group in groups]
        found = metadata.EntryPoints(point._for(Distribution()) for point in points)
        monkeypatch.setattr(metadata, "entry_points", lambda **wanted: found.select(**wanted))
        return identity_of({}, {})

    for group in ("prepare.steps", "prepare.stages", "torch_dynamo_backends"):
        assert identity(group) != identity() == identity("console_scripts")


# ------------------------------------------------------------------------------- two at once


@pytest.mark.parametrize("words", [(), ("resume=true",), ("overwrite=true",)])
def test_a_folder_that_a_command_leads_is_refused(sweep, folder, words):
    (folder / "swept").mkdir()
    with hold_folder(folder / "swept"):
        refused = cli.run(["--multirun", "hydra.sweep.dir=swept", NET + "Net", "seed=0,1", *words])
    assert refused == 2
    assert not list((folder / "swept").iterdir())


# ------------------------------------------------------------------------------- stopped
