"""Files are written and read as they are, and each failure is one clear line."""

import os
import tracemalloc

import pytest

from file_checks import names, posix
from prepare.core.utils import files
from prepare.errors import FileError


@pytest.mark.parametrize("text", ["", "a", "a\nb\r\nc\r", "é日本😀", "\0\x1b", "\ud800", "\udc80\udfff",
                                  "a\ud83d\ude00", "\ufeffx", "x" * 3_000_000], ids=lambda t: ascii(t)[:20])  # fmt: skip
def test_any_text_comes_back_as_it_was(tmp_path, text):
    files.write_text(tmp_path / "a", text)
    assert files.read_text(tmp_path / "a") == text
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
    ("loop", "Too many levels of symbolic links"),
    ("n" * 256, "File name too long; choose a shorter name"),
]
WRITTEN = [(".", IRREGULAR), ("pipe", IRREGULAR), ("to pipe", IRREGULAR)]
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
