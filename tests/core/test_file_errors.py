"""Each failure to read or write a file is one clear line."""

import contextlib
import os

import pytest

from failing_calls import FailAt
from file_checks import NO_SPACE, names, posix
from prepare.core.utils import files, json_records
from prepare.errors import FileError


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


def test_a_full_disk_is_told_in_one_line(tmp_path, monkeypatch):
    FailAt(monkeypatch, 2, NO_SPACE)
    with pytest.raises(FileError) as raised:
        json_records.write_json(tmp_path / "a", {})
    assert str(raised.value) == (
        f"{tmp_path}/a: cannot be written: No space left on device; "
        "free some space or choose another folder"
    )
