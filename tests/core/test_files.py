"""Files are written and read as they are: text, JSON, modes, links."""

import json
import os
import stat
import tracemalloc

import pytest

from file_checks import names, posix
from prepare.core.utils import files, json_records
from prepare.core.utils.text import csv_text
from prepare.errors import FileError


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


@posix
def test_a_link_to_nothing_is_replaced(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "file")
    with files.both(tmp_path / "data", tmp_path / "link"):
        pass
    assert names(tmp_path) == ["data", "link"]
    assert not (tmp_path / "link").is_symlink()


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
    (tmp_path / "link").symlink_to("pipe")
    with pytest.raises(FileError, match="Not a regular file"):
        files.write_text(tmp_path / "link", "x")
    assert (tmp_path / "pipe").is_fifo()
    assert names(tmp_path) == ["link", "pipe"]


@posix
def test_what_is_no_regular_file_is_not_read_and_nothing_waits(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/zero")
    for name in ("pipe", "link"):
        for limit in (None, 9):
            with pytest.raises(FileError) as raised:
                files.read_bytes(tmp_path / name, limit=limit)
            wrong = "cannot be read: Not a regular file; give the path of a file"
            assert str(raised.value) == f"{tmp_path}/{name}: {wrong}"


@pytest.mark.parametrize(
    ("value", "cell"),
    [("=1+1", "'=1+1"), ("+a", "'+a"), ("-a", "'-a"), ("@x", "'@x"), ("\tx", "'\tx"), ("-1-1", "'-1-1"),
     ("-1.5", "-1.5"), ("+2", "+2"), ("-1e-05", "-1e-05"), (-3, "-3"), (-1e-9, "-1e-09"), (None, ""), ("a=1", "a=1")],
)  # fmt: skip
def test_a_cell_is_no_formula_for_a_spreadsheet(value, cell):
    assert csv_text([["first", value]]) == f"first,{cell}\n"
