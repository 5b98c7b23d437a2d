"""Files are written whole or not at all, whichever call fails."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from failing_calls import FailAt
from file_checks import NO_SPACE, names, posix
from paths import ROOT
from prepare.core.utils import files
from prepare.errors import FileError


@pytest.mark.parametrize("error", [NO_SPACE, OSError(errno.EROFS, "Read-only file system"), OSError("odd"),
                                   PermissionError(errno.EACCES, "Permission denied"), KeyboardInterrupt()],
                         ids=repr)  # fmt: skip
@pytest.mark.parametrize("old", [None, "old" * 1000], ids=["new file", "old file"])
def test_a_failure_at_any_call_leaves_the_old_file_and_no_temporary(tmp_path, error, old):
    new, failed = "new" * 1000, []
    for n in range(1, 100):
        folder = tmp_path / str(n)
        folder.mkdir()
        path = folder / "a"
        if old:
            path.write_text(old)
        with pytest.MonkeyPatch.context() as monkeypatch:
            fault = FailAt(monkeypatch, n, error)
            raised = attempt(path, new)
        assert names(folder) in ([], ["a"])
        found = path.read_text() if path.exists() else None
        assert found == new or (raised and found == old)
        # Only the last calls, which sync the folder, come when the new file is in place.
        if isinstance(raised, FileError):
            assert found == old
            assert str(raised).isprintable()
            assert str(raised).startswith(f"{path}: cannot be written: ")
        if not fault.failed:
            break
        failed.append(fault.failed)
    chmod = ["chmod"] if old else []
    first = ["fsync", *chmod, "replace"]
    assert failed == [*first, "open", "fsync", "close"]


def attempt(path: Path, text: str) -> BaseException | None:
    try:
        files.write_text(path, text)
    except (FileError, KeyboardInterrupt) as error:
        return error
    return None


@posix
def test_a_write_cut_short_by_the_system_leaves_the_old_file(tmp_path):
    (tmp_path / "a").write_text("old")
    code = (
        "import resource, sys; from prepare.core.utils import files; from prepare.errors import FileError\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))\n"
        "try: files.write_text('a', 'a' * 100_000)\n"
        "except FileError as error: print(error)\n"
    )
    assert run(code, tmp_path) == "a: cannot be written: File too large\n"
    assert names(tmp_path) == ["a"]
    assert (tmp_path / "a").read_text() == "old"


def run(code: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True, text=True, check=True, cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    return done.stdout
