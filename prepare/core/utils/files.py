"""Read files, write them whole or not at all, and find, name and lock folders; errors name a remedy.

A write goes to a temporary file in the same folder, which is flushed to the disk and then takes
the place of the old file in one operation. A failure, an interrupt or a kill at any moment leaves
the old file or the new one, never a part of either. Only a kill can leave the temporary behind;
its name holds the number of the process and ends in `.prepare-tmp`.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import secrets
import stat
from collections.abc import Iterable, Iterator
from itertools import chain, count
from pathlib import Path
from typing import IO, Any

from prepare.core.utils.suggest import meant, nearest
from prepare.errors import FileError

TEMPORARY = ".prepare-tmp"
_DENIED = (errno.EACCES, errno.EPERM, errno.EROFS)
REMEDIES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "free some space or choose another folder"),
    **dict.fromkeys(_DENIED, "choose another folder, or ask for its permissions"),
    errno.ENOTDIR: "one of its folders is a file: give another path",
    **dict.fromkeys((errno.EISDIR, errno.EINVAL), "give the path of a file"),
    errno.ENAMETOOLONG: "choose a shorter name",
}
# The groups of configurations, each a folder of `conf_dir`, whose options add steps.
STEP_GROUPS = ("device", "precision", "memfmt")


# ------------------------------------------------------------------------------- files
def write_text(path: str | os.PathLike, text: str) -> None:
    r"""Replace the content of the file at `path` by `text` in UTF-8, without translating line ends.

    A module may be named by any string, so lone surrogates are written ("surrogatepass"), and
    `read_text` returns them. Formats that can escape them (JSON, recipes, pages) do so before.
    The file gets the permissions that `open(path, "w")` would give: those of the file it replaces,
    else what the umask leaves. A symbolic link is replaced, not followed. Raises FileError.
    """
    with new_file(path) as file:
        file.write(text.encode("utf-8", "surrogatepass"))


def read_bytes(path: str | os.PathLike, *, limit: int | None = None) -> bytes:
    """Return the content of the file at `path`; raise FileError, also if it exceeds `limit` bytes.

    At most `limit` + 1 bytes are read, so a huge file does no harm.
    """
    try:
        with open(path, "rb") as file:
            data = file.read() if limit is None else file.read(limit + 1)
    except (OSError, ValueError) as error:
        raise _file_error(path, "read", error) from error
    if limit is not None and len(data) > limit:
        wrong = f"is larger than {limit:,} bytes"
        raise FileError(printable_path(path), wrong, "give a smaller file")
    return data


def read_text(path: str | os.PathLike, *, limit: int | None = None) -> str:
    """Return the text of the UTF-8 file at `path`, as `write_text` wrote it; raise FileError."""
    data = read_bytes(path, limit=limit)
    try:
        return data.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        wrong = f"is not UTF-8 text (byte {error.start:,})"
        raise FileError(printable_path(path), wrong, "save it as UTF-8") from error


# `Path.is_file` and `Path.is_dir` raise if a name is too long.
is_file, is_folder = os.path.isfile, os.path.isdir


@contextlib.contextmanager
def new_file(path: str | os.PathLike) -> Iterator[IO[bytes]]:
    """Yield a new file to write, which replaces `path` if the block succeeds. Raises FileError.

    Its `name` is that of the temporary file, which the block may also write by its name.
    """
    target = os.fsdecode(path)
    folder = os.path.dirname(target) or os.curdir
    # The name is known before the file exists, so it can be removed after an interrupt at any moment.
    temporary = os.path.join(folder, f".{os.getpid()}-{secrets.token_hex(8)}{TEMPORARY}")
    try:
        mode = _mode(target)
        try:
            with open(temporary, "xb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            if mode is not None:
                os.chmod(temporary, mode)
            os.replace(temporary, target)
        finally:
            with contextlib.suppress(OSError, ValueError):
                os.unlink(temporary)
    except (OSError, ValueError) as error:
        raise _file_error(path, "written", error) from error
    # Where a folder cannot be synced, the new name may not survive a power cut: no reason to fail.
    with contextlib.suppress(OSError), _opened(folder) as handle:
        os.fsync(handle)


def missing_remedy(path: str | os.PathLike) -> str:
    """Return what to do about a path that does not exist: the folder that is missing, or a similar name."""
    folder, name = os.path.split(os.fsdecode(path))
    try:
        # The search for a close match takes time for each name.
        close = nearest(name, os.listdir(folder or os.curdir)[:1000])
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return f"there is no folder {printable_path(folder)}"
    except OSError:
        return ""
    return f"did you mean {printable_path(Path(folder, close[0]))}?" if close else ""


def printable_path(path: str | os.PathLike) -> str:
    """Return a path as it can be printed on one line of any terminal."""
    text = os.fsdecode(path)
    return text if text.isprintable() and text else ascii(text)


def _mode(target: str) -> int | None:
    """Return the permissions of the file to replace, or None; raise OSError where open() would."""
    try:
        mode = os.stat(target).st_mode
    except FileNotFoundError:
        return None
    # Replacing a device (/dev/null) or a pipe by a file would break it for other programs.
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "Not a regular file")
    # rename checks only the folder; a write-protected file must stay.
    if not os.access(target, os.W_OK):
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))
    return stat.S_IMODE(mode)


def _file_error(path: str | os.PathLike, done: str, error: OSError | ValueError) -> FileError:
    code = getattr(error, "errno", None)
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    remedy = missing_remedy(path) if code == errno.ENOENT else REMEDIES.get(code or 0, "")
    return FileError(printable_path(path), f"cannot be {done}: {' '.join(reason.split())}", remedy)


class LogFile(logging.FileHandler):
    """The log of a run, for Hydra's `job_logging`: its first message makes it.

    It is left out if it cannot be written.
    """

    def __init__(self, filename: str | os.PathLike[str]) -> None:
        super().__init__(filename, delay=True, encoding="utf-8", errors="backslashreplace")

    def emit(self, record: logging.LogRecord) -> None:
        """Append a message; a full disk stops neither the run nor its output."""
        with contextlib.suppress(OSError):
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  a name of logging
        """Ignore an error that `FileHandler` would print with a traceback."""


# ------------------------------------------------------------------------------- folders
def conf_dir() -> Path:
    """Return the folder of configurations: inside the package in a wheel, beside it in a checkout."""
    package = Path(__file__).resolve().parents[2]
    inside = package / "conf"
    return inside if inside.is_dir() else package.parent / "conf"


def own_name(group: str, option: Any) -> Any:
    """Return the name of the file of an option in a group of steps: `bfloat16` for `bf16`."""
    if group not in STEP_GROUPS or not isinstance(option, str):
        return option
    return meant(option, (file.stem for file in (conf_dir() / group).glob("*.yaml"))) or option


def run_name(model: str | None, overrides: Iterable[str]) -> str:
    """Return what names the folder of a run: its model, or the class that `model._target_=` names."""
    targets = [word for word in map(str, overrides) if word.startswith("model._target_=")]
    given = targets[-1].rpartition("=")[2].rpartition(".")[2] if targets else "run"
    name = given if model in (None, "custom") else str(model)
    return re.sub(r"[^\w-]+", "-", name, flags=re.ASCII)[:60].strip("-") or "run"


def new_folder(base: Path) -> Path:
    """Make a folder, by one process only; one that is there already gets a number behind its name."""
    names = (f"{base.name}-{number}" for number in count(2))
    for name in chain([base.name], names):
        with contextlib.suppress(FileExistsError):
            base.with_name(name).mkdir(parents=True)
            break
    return base.with_name(name)


@contextlib.contextmanager
def hold_folder(folder: Path) -> Iterator[bool]:
    """Lock an existing folder within the block; yield False if another process of this machine has.

    This leaves no file in it. Without such locks (Windows, some network folders) it always yields True.
    """
    with contextlib.ExitStack() as stack:
        held = True
        with contextlib.suppress(OSError):  # Windows opens no folder
            handle = stack.enter_context(_opened(folder))
            import fcntl

            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                held = False
        yield held


@contextlib.contextmanager
def _opened(folder: str | os.PathLike) -> Iterator[int]:
    handle = os.open(folder, os.O_RDONLY)
    try:
        yield handle
    finally:
        os.close(handle)
