"""Folders of runs: those that cannot be made, and many runs at once."""

import json
from pathlib import Path

import pytest

from prepare.app.cli import main as cli
from prepare.audit import Audit
from run_faults import SMALL, WRITTEN, all_whole, drive, posix, status, told

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


TOGETHER = """
    for turn in range(count):
        instant, children = time.time() + 0.05, []
        for index in range(together):
            child = os.fork()
            if not child:
                while time.time() < instant:
                    pass
                width = 8 + turn * together + index
                sweep = ["--multirun", "seed=1,2"] if index % 4 == 3 else []
                os._exit(run(f"out-{width}.txt", *sweep, f"+model.width={width}"))
            children.append(child)
        print(*(os.waitpid(child, 0)[1] for child in children), flush=True)
"""


def widths(folder: Path) -> list[int]:
    """The width each run's folder speaks of: the same in every file of it."""
    found = []
    for result in folder.glob("**/result.json"):
        where = result.parent
        assert set(all_whole(where)) == set(WRITTEN)
        assert status(where) == "ok"
        (asked,) = [
            word
            for word in json.loads((where / "job.json").read_text())["overrides"]
            if "width" in word
        ]
        width = int(asked.split("=")[1])
        rows = {row.path: row for row in Audit.load(where / "audit.json").rows}
        assert rows["0.weight"].shape == (width, 3, 3, 3)
        plan = json.loads((where / "plan.json").read_text())
        assert f"[{width}, 3, 3, 3]" in json.dumps(plan)
        found.append(width)
    return found


def check_together(folder: Path, runs: int, rounds: int) -> None:
    assert drive(TOGETHER, rounds, folder, together=runs) == [0] * runs * rounds
    every = range(8, 8 + runs * rounds)
    sweeps = [width for width in every if width % 4 == 3]
    assert sorted(widths(folder / "outputs")) == [width for width in every if width not in sweeps]
    assert sorted(widths(folder / "multirun")) == sorted(sweeps * 2)
    summaries = [json.loads(path.read_text()) for path in folder.glob("multirun/*/*/summary.json")]
    assert len(summaries) == len(sweeps)
    assert all([row["status"] for row in summary["rows"]] == ["ok", "ok"] for summary in summaries)
    # It was a test only if some of them did start in the same second.
    seconds = [path.name[:8] for path in folder.glob("outputs/*/*")]
    assert len(set(seconds)) < len(seconds)


@pytest.mark.slow
@posix
def test_runs_and_sweeps_of_the_same_second_have_folders_of_their_own(folder):
    check_together(folder, runs=4, rounds=1)
