"""Runs whose files cannot be written: a full disk, a failing call, an interrupt at a write."""

import errno
import json
import os
from pathlib import Path

import pytest

from prepare.app.cli import main as cli
from prepare.app.job import record
from prepare.core.utils import files
from run_faults import SMALL, WRITTEN, all_whole, status, told

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Failing:
    """Makes one `os.replace` fail, or that and every later one."""

    def __init__(self, patch: pytest.MonkeyPatch, n: int, *, after: bool):
        self.left, self.after, self.failed = n, after, 0
        # What `files` sees, and nothing else: Hydra and pytest write too.
        system = type("System", (), {"__getattr__": lambda _, name: getattr(os, name)})()
        system.replace = self.replace
        patch.setattr(files, "os", system)

    def replace(self, source, target):
        self.left -= 1
        if self.left == 0 or (self.after and self.left < 0):
            self.failed += 1
            raise FULL
        return Path(source).replace(target)


def run_that_fails(n: int, folder: Path, capsys, *, after) -> tuple[int, Failing, list[str]]:
    with pytest.MonkeyPatch.context() as patch:
        fault = Failing(patch, n, after=after)
        code = cli.run([*SMALL, f"hydra.run.dir={folder}"])
    return code, fault, told(capsys.readouterr().err)


@pytest.mark.parametrize(
    ("after", "step"),
    [pytest.param(False, 1, marks=pytest.mark.slow, id="only that one"),
     pytest.param(True, 1, marks=pytest.mark.slow, id="all from then on"),
     pytest.param(True, 4, id="some")],
)  # fmt: skip
def test_a_disk_that_is_full_at_write_number_n_is_one_line_and_exit_1(folder, capsys, after, step):
    found = []
    for n in range(1, 50, step):
        where = folder / f"run{n}"
        code, fault, err = run_that_fails(n, where, capsys, after=after)
        names = all_whole(where)
        if not fault.failed:
            break
        assert (code, len(err)) == (1, 1)
        assert err[0].endswith(
            "cannot be written: No space left on device; free some space or choose another folder"
        )
        found.append(err[0].split(":")[0].split("/")[-1])
        # What was written before stays: one file more with every turn.
        assert len(names) == (n - 1 if after else min(n, len(WRITTEN)))
        if "result.json" in names:
            assert status(where) == "failed"
            assert json.loads((where / "result.json").read_text())["reason"] == "file"
    assert code == 0
    assert set(names) == set(WRITTEN) < set(record.files_in())
    # Everything that a run writes has failed once.
    assert set(found) == set(WRITTEN) if step == 1 else len(set(found)) > 2
