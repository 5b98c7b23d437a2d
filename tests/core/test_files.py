"""Files are written whole or not at all, whatever fails, and every failure is one clear line."""

import contextlib
import errno
import json
import os
import random
import signal
import stat
import subprocess
import sys
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from failing_calls import FailAt
from paths import ROOT
from prepare.core.utils import files, json_records
from prepare.errors import FileError

NO_SPACE = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
posix = pytest.mark.skipif(os.name != "posix", reason="asks for links, modes and signals of POSIX")


def names(folder: Path) -> list[str]:
    return sorted(found.name for found in folder.iterdir())


# ------------------------------------------------------------------------------- writing and reading


@pytest.mark.parametrize("text", ["", "a", "a\nb\r\nc\r", "é日本😀", "\0\x1b", "\ud800", "\udc80\udfff",
                                  "a\ud83d\ude00", "\ufeffx", "x" * 3_000_000], ids=lambda t: ascii(t)[:20])  # fmt: skip
def test_any_text_comes_back_as_it_was(tmp_path, text):
    files.write_text(tmp_path / "a", text)
    assert files.read_text(tmp_path / "a") == text
    assert names(tmp_path) == ["a"]


def test_text_without_lone_surrogates_is_plain_utf_8(tmp_path):
    files.write_text(tmp_path / "a", "é😀\r\n")
    assert (tmp_path / "a").read_bytes() == "é😀\r\n".encode()


def test_a_file_is_replaced_by_one_that_is_shorter(tmp_path):
    path = tmp_path / "a"
    files.write_bytes(path, b"long " * 1000)
    files.write_bytes(str(path), b"short")
    assert files.read_bytes(str(path)) == b"short"


def test_a_name_without_a_folder_is_written_where_the_program_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    files.write_text("a", "x")
    assert names(tmp_path) == ["a"]


def test_a_name_may_be_as_long_as_the_file_system_lets_it(tmp_path):
    path = tmp_path / ("n" * 255)
    files.write_text(path, "x")
    assert path.read_text() == "x"


DATA = {
    "b": 1,
    "a": [{"x": [1, 2]}, {"é": None}],
    "none": [],
    "text": "\ud800<>&",
    "deep": {"k": [1.5, True]},
}


def test_json_keeps_the_order_of_keys_and_is_ascii(tmp_path):
    json_records.write_json(tmp_path / "a.json", DATA)
    text = files.read_text(tmp_path / "a.json")
    assert text.isascii()
    assert text.startswith('{\n "b": 1,\n "a": [\n  {\n')
    assert text.endswith("}\n")
    assert list(json.loads(text)) == list(DATA)
    assert json.loads(text) == DATA


def test_json_in_lines_has_one_item_of_a_list_on_each(tmp_path):
    json_records.write_json(tmp_path / "a.json", DATA, lines=True)
    text = files.read_text(tmp_path / "a.json")
    assert text == (
        '{\n"b": 1,\n"a": [\n{"x": [1, 2]},\n{"\\u00e9": null}\n],\n"none": [],\n'
        '"text": "\\ud800<>&",\n"deep": {"k": [1.5, true]}\n}\n'
    )
    assert json.loads(text) == DATA


@pytest.mark.parametrize("lines", [False, True])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), [-float("inf")], object()])
def test_json_of_what_json_cannot_hold_leaves_the_old_file(tmp_path, value, lines):
    json_records.write_json(tmp_path / "a", {"old": 1})
    with pytest.raises((ValueError, TypeError)):
        json_records.write_json(tmp_path / "a", {"new": value}, lines=lines)
    assert json.loads(files.read_text(tmp_path / "a")) == {"old": 1}
    assert names(tmp_path) == ["a"]


def test_no_more_than_the_limit_is_read(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"12345")
    assert files.read_bytes(path, limit=5) == b"12345"
    assert files.read_text(path, limit=5) == "12345"
    with pytest.raises(FileError) as raised:
        files.read_bytes(path, limit=4)
    assert str(raised.value) == f"{path}: is larger than 4 bytes; give a smaller file"


def test_a_huge_file_is_refused_by_its_limit_without_being_read(tmp_path):
    (tmp_path / "a").touch()
    os.truncate(tmp_path / "a", 100_000_000)
    tracemalloc.start()
    with pytest.raises(FileError, match="a: is larger than 1,000 bytes"):
        files.read_bytes(tmp_path / "a", limit=1000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000


# ------------------------------------------------------------------------------- modes and links


@posix
@pytest.mark.parametrize("umask", [0o000, 0o022, 0o027, 0o077])
def test_a_new_file_has_the_mode_that_open_gives(tmp_path, umask):
    before = os.umask(umask)
    try:
        files.write_text(tmp_path / "ours", "x")
        (tmp_path / "theirs").write_text("x")
    finally:
        os.umask(before)
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "theirs").stat().st_mode


@posix
def test_a_file_that_is_replaced_keeps_its_mode(tmp_path):
    path = tmp_path / "a"
    path.write_text("old")
    path.chmod(0o640)
    files.write_text(path, "new")
    assert path.read_text() == "new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


@posix
def test_a_link_is_followed_to_its_file(tmp_path):
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "file").write_text("old")
    (tmp_path / "middle").symlink_to("far/file")
    (tmp_path / "link").symlink_to("middle")
    files.write_text(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "middle").is_symlink()
    assert (tmp_path / "far" / "file").read_text() == "new"
    assert names(tmp_path / "far") == ["file"]


@posix
def test_a_link_to_nothing_makes_the_file_it_points_to(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "file")
    files.write_text(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_text() == "new"


@posix
def test_a_link_to_itself_is_refused(tmp_path):
    (tmp_path / "link").symlink_to("link")
    with pytest.raises(
        FileError, match="link: cannot be written: Too many levels of symbolic links"
    ):
        files.write_text(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert names(tmp_path) == ["link"]


@posix
def test_what_is_no_regular_file_is_refused_and_not_replaced(tmp_path):
    # A pipe of our own stands for all of them: never try /dev/null, which root could really replace.
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FileError) as raised:
        files.write_text(tmp_path / "pipe", "x")
    assert str(raised.value) == (
        f"{tmp_path}/pipe: cannot be written: Not a regular file; give the path of a file"
    )
    assert (tmp_path / "pipe").is_fifo()
    assert names(tmp_path) == ["pipe"]


# ------------------------------------------------------------------------------- errors


def failure(act, *arguments) -> str:
    with pytest.raises(FileError) as raised:
        act(*arguments)
    text = str(raised.value)
    assert text.isprintable()
    assert raised.value.problems[0].where == files.printable_path(arguments[0])
    return text


def test_a_missing_file_is_named_with_the_nearest_name_in_its_folder(tmp_path, monkeypatch):
    (tmp_path / "recipe.yaml").touch()
    missing = tmp_path / "recpie.yaml"
    near = tmp_path / "recipe.yaml"
    nothing = "cannot be read: No such file or directory"
    assert failure(files.read_text, missing) == f"{missing}: {nothing}; did you mean {near}?"
    assert failure(files.read_text, tmp_path / "qqqq") == f"{tmp_path}/qqqq: {nothing}"
    monkeypatch.chdir(tmp_path)
    assert (
        failure(files.read_text, "recpie.yaml")
        == f"recpie.yaml: {nothing}; did you mean recipe.yaml?"
    )


@pytest.mark.parametrize(
    ("act", "done"), [(files.read_bytes, "read"), (files.write_text, "written")]
)
def test_a_missing_folder_is_named(tmp_path, act, done):
    path = tmp_path / "no" / "a"
    more = ["x"] if done == "written" else []
    assert failure(act, path, *more) == (
        f"{path}: cannot be {done}: No such file or directory; there is no folder {tmp_path}/no"
    )


@posix
def test_a_folder_that_is_a_file_is_named(tmp_path):
    (tmp_path / "file").write_text("old")
    path = tmp_path / "file" / "a"
    remedy = "one of its folders is a file: give another path"
    assert (
        failure(files.write_text, path, "x")
        == f"{path}: cannot be written: Not a directory; {remedy}"
    )
    assert failure(files.read_text, path) == f"{path}: cannot be read: Not a directory; {remedy}"
    assert (tmp_path / "file").read_text() == "old"


@posix
def test_a_folder_in_place_of_a_file_is_refused(tmp_path):
    assert failure(files.write_text, tmp_path, "x") == (
        f"{tmp_path}: cannot be written: Is a directory; give the path of a file"
    )
    assert failure(files.read_text, tmp_path) == (
        f"{tmp_path}: cannot be read: Is a directory; give the path of a file"
    )
    assert names(tmp_path) == []


@posix
def test_a_name_that_is_too_long_is_refused(tmp_path):
    text = failure(files.write_text, tmp_path / ("n" * 256), "x")
    assert text.endswith(": cannot be written: File name too long; choose a shorter name")
    assert names(tmp_path) == []


@pytest.mark.parametrize("name", ["a\0b", "a\nb", "\x1b[31m", "\ud800", ""], ids=ascii)
def test_a_path_that_no_terminal_can_show_is_still_one_line(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    assert failure(files.read_text, name).startswith(ascii(name) + ": cannot be read: ")
    with contextlib.suppress(FileError):
        files.write_text(name, "x")
    assert names(tmp_path) in ([], [name])


def test_bytes_that_are_no_text_are_refused(tmp_path):
    (tmp_path / "a").write_bytes(b"abc\xff")
    assert failure(files.read_text, tmp_path / "a") == (
        f"{tmp_path}/a: is not UTF-8 text (byte 3); save it as UTF-8"
    )


@posix
@pytest.mark.skipif(
    os.geteuid() == 0 if os.name == "posix" else True, reason="root may write anywhere"
)
def test_a_read_only_folder_and_a_read_only_file_are_left_alone(tmp_path):
    path = tmp_path / "a"
    path.write_text("old")
    path.chmod(0o444)
    assert "Permission denied" in failure(files.write_text, path, "new")
    path.chmod(0o644)
    tmp_path.chmod(0o555)
    try:
        assert "Permission denied" in failure(files.write_text, path, "new")
    finally:
        tmp_path.chmod(0o755)
    assert path.read_text() == "old"
    assert names(tmp_path) == ["a"]


@posix
def test_a_write_protected_file_in_a_writable_folder_stays(tmp_path, monkeypatch):
    path = tmp_path / "a"
    path.write_text("old")
    # root passes every such question, so it is answered here as it would be to anybody else.
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert failure(files.write_text, path, "new") == (
        f"{path}: cannot be written: Permission denied; choose another folder, or ask for its permissions"
    )
    assert path.read_text() == "old"
    assert names(tmp_path) == ["a"]


@posix
def test_a_read_only_file_system_is_an_error_of_one_line():
    if not os.access("/proc/version", os.F_OK):
        pytest.skip("no file system here that nobody can write to")
    assert failure(files.write_text, "/proc/prepare-test", "x").startswith(
        "/proc/prepare-test: cannot be written: "
    )


# ------------------------------------------------------------------------------- failure number N


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
    writes = ["write"] * 5
    chmod = ["chmod"] if old else []
    assert failed == [
        "open",
        *writes,
        "fsync",
        "close",
        *chmod,
        "replace",
        "open",
        "fsync",
        "close",
    ]


def attempt(path: Path, text: str) -> BaseException | None:
    try:
        files.write_text(path, text)
    except (FileError, KeyboardInterrupt) as error:
        return error
    return None


def test_a_full_disk_is_told_in_one_line(tmp_path, monkeypatch):
    FailAt(monkeypatch, 2, NO_SPACE)
    with pytest.raises(FileError) as raised:
        json_records.write_json(tmp_path / "a", {})
    assert str(raised.value) == (
        f"{tmp_path}/a: cannot be written: No space left on device; "
        "free some space or choose another folder"
    )


def test_a_folder_that_cannot_be_synced_is_no_failure(tmp_path, monkeypatch):
    real = os.open

    def no_folders(path, *more):
        if Path(path).is_dir():
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, *more)

    monkeypatch.setattr(os, "open", no_folders)
    files.write_text(tmp_path / "a", "x")
    assert (tmp_path / "a").read_text() == "x"


@posix
def test_a_file_is_synced_before_its_rename_and_the_folder_after(tmp_path, monkeypatch):
    done = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(
        os,
        "fsync",
        lambda handle: (done.append(stat.S_ISDIR(os.fstat(handle).st_mode)), fsync(handle)),
    )
    monkeypatch.setattr(os, "replace", lambda *paths: (done.append("replace"), replace(*paths)))
    files.write_text(tmp_path / "a", "x")
    assert done == [False, "replace", True]


@posix
def test_a_write_cut_short_by_the_system_leaves_the_old_file(tmp_path):
    (tmp_path / "a").write_text("old")
    code = (
        "import resource, sys; from prepare.core.utils import files; from prepare.errors import FileError\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))\n"
        "try: files.write_bytes('a', bytes(100_000))\n"
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


# ------------------------------------------------------------------------------- many, and killed


def test_writers_of_the_same_file_never_mix(tmp_path):
    path = tmp_path / "a"

    def write(k: int) -> None:
        for _ in range(20):
            files.write_text(path, str(k) * 5000)
            assert len(set(files.read_text(path))) == 1

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(8)))
    assert len(files.read_text(path)) == 5000
    assert names(tmp_path) == ["a"]


WRITER = """
import itertools, sys
from prepare.core.utils import files, json_records
for n in itertools.count():
    json_records.write_json("a.json", {"rows": [n] * (1 + n % 7 * 3000)}, lines=True)
    files.write_text("b.txt", f"{n} " * (1 + n % 5 * 9000))
    if n == 1:
        print("ready", flush=True)
"""


def kill_writers(folder: Path, kills: int) -> int:
    """Kills a writer `kills` times at random moments; returns how many kills left a temporary."""
    rng, stray = random.Random(5), 0
    for _ in range(kills):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER], cwd=folder, stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        with writer:
            assert writer.stdout.readline() == b"ready\n"
            time.sleep(rng.uniform(0, 0.05))
            writer.send_signal(signal.SIGKILL)
        assert writer.returncode == -signal.SIGKILL
        rows = json.loads((folder / "a.json").read_text())["rows"]
        assert len(rows) == 1 + rows[0] % 7 * 3000
        words = (folder / "b.txt").read_text().split()
        assert len(words) == 1 + int(words[0]) % 5 * 9000
        stray += clear(folder)
    return stray


def clear(folder: Path) -> int:
    left = sorted(set(names(folder)) - {"a.json", "b.txt"})
    assert len(left) <= 1
    for name in left:
        assert name.endswith(files.TEMPORARY)
        (folder / name).unlink()
    return len(left)


@posix
def test_a_writer_killed_at_any_moment_leaves_whole_files(tmp_path):
    kill_writers(tmp_path, 10)


@posix
@pytest.mark.slow
def test_two_hundred_killed_writers_leave_whole_files(tmp_path):
    stray = kill_writers(tmp_path, 200)
    assert stray > 0  # else no kill fell into a write, and nothing was tested
