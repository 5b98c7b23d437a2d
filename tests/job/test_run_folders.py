"""Folders of runs: those that cannot be made, and many runs at once."""

import pytest

from prepare.app.cli import main as cli
from run_faults import SMALL, told

IMPOSSIBLE = ["file/x", "file", "/proc/x", "n" * 300]


@pytest.mark.parametrize("where", IMPOSSIBLE, ids=lambda where: where[:10])
@pytest.mark.parametrize(
    "words",
    [["hydra.run.dir"], ["--multirun", "seed=1,2", "hydra.sweep.dir"]],
    ids=["run", "sweep"],
)
def test_a_folder_that_cannot_be_made_is_one_line_and_exit_1(folder, capsys, words, where):
    (folder / "file").write_text("mine")
    *first, option = words
    code = cli.run([*first, *SMALL, f"{option}={where}"])
    out, err = capsys.readouterr()
    (line,) = told(err)
    assert (code, out) == (1, "")
    assert f"{where}: cannot be used: " in line
    assert first or line.startswith(where)  # the folder of a sweep is shown in full
    assert line.endswith(f"{option}=FOLDER") or "; " in line
    assert (folder / "file").read_text() == "mine"
