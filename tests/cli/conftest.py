"""The command line in this process, for the tests of this folder."""

import html
import json
from pathlib import Path
from typing import NamedTuple

import pytest
from hydra.core.global_hydra import GlobalHydra

from prepare.app.cli import main as cli


class Ran(NamedTuple):
    code: int
    out: str
    err: str
    folders: list[Path]

    @property
    def folder(self):
        (folder,) = self.folders
        return folder

    @property
    def result(self):
        return json.loads((self.folder / "result.json").read_text())

    @property
    def page(self):
        return html.unescape((self.folder / "report.html").read_text())


@pytest.fixture
def go(tmp_path, monkeypatch, capsys):
    """Runs the command line in an empty folder, in this process."""
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.chdir(tmp_path)

    def run(*argv):
        before = {path.parent for path in tmp_path.glob("outputs/*/*/result.json")}
        with pytest.raises(SystemExit) as stop:
            cli.main(untimed(argv))
        out, err = capsys.readouterr()
        # What takes over a second on a busy machine is announced, which is not an error.
        err = "".join(row for row in err.splitlines(keepends=True) if not row.endswith(" ...\n"))
        assert not GlobalHydra.instance().is_initialized()
        after = {path.parent for path in tmp_path.glob("outputs/*/*/result.json")}
        return Ran(stop.value.code, out, err, sorted(after - before))

    return run


def untimed(argv):
    """The words of a job, with `bench=none` where they do not say what is to be timed."""
    is_job = any(word.startswith("model") for word in argv)
    is_asked = any(word.startswith("bench=") for word in argv)
    return [*argv, "bench=none"] if is_job and not is_asked else list(argv)
