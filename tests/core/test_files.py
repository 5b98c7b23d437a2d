"""Files are written and read as they are, and each failure is one clear line."""

import contextlib
import json
import os
import stat
import tracemalloc

import pytest

from failing_calls import FailAt
from file_checks import NO_SPACE, names, posix
from prepare.core.utils import files, json_records
from prepare.errors import FileError


@pytest.mark.parametrize("text", ["", "a", "a\nb\r\nc\r", "é日本😀", "\0\x1b", "\ud800", "\udc80\udfff",
                                  "a\ud83d\ude00", "\ufeffx", "x" * 3_000_000], ids=lambda t: ascii(t)[:20])  # fmt: skip
def test_any_text_comes_back_as_it_was(tmp_path, text):
    files.write_text(tmp_path / "a", text)
    assert files.read_text(tmp_path / "a") == text
    assert names(tmp_path) == ["a"]


def test_a_file_of_any_name_is_replaced_by_one_that_is_shorter(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in ("a", tmp_path / "b", tmp_path / ("n" * 255)):
        files.write_bytes(path, b"long " * 1000)
        files.write_bytes(str(path), b"short")
        assert files.read_bytes(str(path)) == b"short"
    assert names(tmp_path) == ["a", "b", "n" * 255]


DATA = {"b": 1, "a": [{"x": [1, 2]}, {"é": None}], "none": [], "text": "\ud800<>&", "deep": {"k": [1.5, True]}}  # fmt: skip


def test_json_has_one_item_of_a_list_on_each_line_and_is_ascii(tmp_path):
    json_records.write_json(tmp_path / "a.json", DATA)
    text = files.read_text(tmp_path / "a.json")
    assert text == (
        '{\n"b": 1,\n"a": [\n{"x": [1, 2]},\n{"\\u00e9": null}\n],\n"none": [],\n'
        '"text": "\\ud800<>&",\n"deep": {"k": [1.5, true]}\n}\n'
    )
    assert list(json.loads(text)) == list(DATA)
    assert json.loads(text) == DATA


@pytest.mark.parametrize("value", [float("nan"), float("inf"), [-float("inf")], object()])
def test_json_of_what_json_cannot_hold_leaves_the_old_file(tmp_path, value):
    json_records.write_json(tmp_path / "a", {"old": 1})
    with pytest.raises((ValueError, TypeError)):
        json_records.write_json(tmp_path / "a", {"new": value})
    assert json.loads(files.read_text(tmp_path / "a")) == {"old": 1}
    assert names(tmp_path) == ["a"]


def test_no_more_than_the_limit_is_read(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"12345")
    assert files.read_bytes(path, limit=5) == b"12345"
    assert files.read_text(path, limit=5) == "12345"
    for size in (6, 100_000_000):
        os.truncate(path, size)
        tracemalloc.start()
        said = failure(files.read_bytes, path, limit=5)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert said == f"{path}: is larger than 5 bytes; give a smaller file"
        assert peak < 1_000_000


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
def test_a_link_is_replaced_and_its_file_stays(tmp_path):
    (tmp_path / "file").write_text("old")
    (tmp_path / "file").chmod(0o400)
    (tmp_path / "middle").symlink_to("file")
    (tmp_path / "link").symlink_to("middle")
    (tmp_path / "new").write_text("")
    files.write_text(tmp_path / "link", "new")
    assert not (tmp_path / "link").is_symlink()
    assert (tmp_path / "link").read_text() == "new"
    assert (tmp_path / "link").stat().st_mode == (tmp_path / "new").stat().st_mode
    assert (tmp_path / "middle").is_symlink()
    assert (tmp_path / "file").read_text() == "old"


def failure(act, *arguments, **options) -> str:
    with pytest.raises(FileError) as raised:
        act(*arguments, **options)
    text = str(raised.value)
    assert text.isprintable()
    assert raised.value.problems[0].where == files.printable_path(arguments[0])
    return text


# ------------------------------------------------------------------------- failures, each in one line


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "recipe.yaml").write_text("old")
    # A pipe of our own stands for all devices: never try /dev/null, which root could really replace.
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "to pipe").symlink_to("pipe")
    (tmp_path / "loop").symlink_to("loop")
    return tmp_path


MISSING = "No such file or directory"
IRREGULAR = "Not a regular file; give the path of a file"
BOTH = [
    ("no/a", f"{MISSING}; there is no folder {{folder}}/no"),
    ("recipe.yaml/a", "Not a directory; one of its folders is a file: give another path"),
    (".", "Is a directory; give the path of a file"),
    ("loop", "Too many levels of symbolic links"),
    ("n" * 256, "File name too long; choose a shorter name"),
]
WRITTEN = [("pipe", IRREGULAR), ("to pipe", IRREGULAR)]
READ = [("recpie.yaml", f"{MISSING}; did you mean {{folder}}/recipe.yaml?"), ("qqqq", MISSING)]


@posix
@pytest.mark.parametrize(
    ("done", "name", "wrong"),
    [("written", *case) for case in BOTH + WRITTEN] + [("read", *case) for case in BOTH + READ],
)
def test_a_failure_names_the_file_and_what_to_do(folder, done, name, wrong):
    before, path = names(folder), folder / name
    said = f"{path}: cannot be {done}: {wrong.format(folder=folder)}"
    if done == "written":
        assert failure(files.write_text, path, "x") == said
    else:
        assert failure(files.read_bytes, path) == said
        with pytest.raises(FileError):
            files.read_bytes(path, limit=9)
    assert names(folder) == before
    assert files.read_text(folder / "recipe.yaml") == "old"
    assert (folder / "pipe").is_fifo()


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


def test_a_full_disk_is_told_in_one_line(tmp_path, monkeypatch):
    FailAt(monkeypatch, 1, NO_SPACE)
    with pytest.raises(FileError) as raised:
        json_records.write_json(tmp_path / "a", {})
    assert str(raised.value) == (
        f"{tmp_path}/a: cannot be written: No space left on device; "
        "free some space or choose another folder"
    )
