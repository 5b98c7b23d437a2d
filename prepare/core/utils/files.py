"""Reading files and writing them whole or not at all, with errors that a user can act on.

A write goes to a temporary file in the same folder, which is flushed to the disk and then takes
the place of the old file in one operation. A failure, an interrupt or a kill at any moment leaves
the old file or the new one, never a part of either. Only a kill can leave the temporary behind;
its name ends in `.prepare-tmp`.
"""

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from prepare.core.utils.signals import held_interrupts
from prepare.core.utils.suggest import nearest
from prepare.errors import FileError

TEMPORARY = ".prepare-tmp"

REMEDIES = {
    errno.ENOSPC: "free some space or choose another folder",
    errno.EDQUOT: "free some space or choose another folder",
    errno.EACCES: "choose another folder, or ask for its permissions",
    errno.EPERM: "choose another folder, or ask for its permissions",
    errno.EROFS: "choose a folder that can be written to",
    errno.ENOTDIR: "one of its folders is a file: give another path",
    errno.EISDIR: "give the path of a file",
    errno.EINVAL: "give the path of a file",
    errno.ENAMETOOLONG: "choose a shorter name",
}


def write_bytes(path: str | os.PathLike, data: bytes) -> None:
    """Make `data` the whole content of the file at `path`, or change nothing.

    The file gets the permissions that `open(path, "w")` would give: those of the file it replaces,
    else what the umask leaves. A symbolic link is followed. Raises FileError.
    """
    try:
        _put(_target(path), data)
    except (OSError, ValueError) as error:
        raise _file_error(path, "written", error) from error


def write_text(path: str | os.PathLike, text: str) -> None:
    r"""Make `text`, in UTF-8 and with its line ends as they are, the whole content of `path`.

    A module may be named by any string, so lone surrogates are let through ("surrogatepass") and
    `read_text` gives them back. Strict readers refuse such bytes: formats that can escape (JSON,
    recipes, pages) do so before they come here. Raises FileError.
    """
    write_bytes(path, text.encode("utf-8", "surrogatepass"))


def read_bytes(path: str | os.PathLike, *, limit: int | None = None) -> bytes:
    """The content of the file at `path`; raises FileError, also if it has more than `limit` bytes.

    No more than `limit` bytes and one are ever read, so a huge or endless file does no harm.
    """
    try:
        with open(path, "rb") as file:
            data = file.read() if limit is None else file.read(limit + 1)
    except (OSError, ValueError) as error:
        raise _file_error(path, "read", error) from error
    if limit is not None and len(data) > limit:
        raise FileError(
            printable_path(path), f"is larger than {limit:,} bytes", "give a smaller file"
        )
    return data


def read_text(path: str | os.PathLike, *, limit: int | None = None) -> str:
    """The text of the UTF-8 file at `path`, as `write_text` wrote it; raises FileError."""
    data = read_bytes(path, limit=limit)
    try:
        return data.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        wrong = f"is not UTF-8 text (byte {error.start:,})"
        raise FileError(printable_path(path), wrong, "save it as UTF-8") from error


class NewFile:
    """A file that is written beside another, and takes its place in one operation."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._mode = _mode(target)
        folder = os.path.dirname(target) or os.curdir
        # The name is known before the file exists, so an interrupt at any moment can remove it.
        self._temporary = os.path.join(folder, f".{secrets.token_hex(8)}{TEMPORARY}")
        self._handle = -1

    def open(self) -> None:
        """Makes the file."""
        # os.open and not tempfile: mkstemp makes files that nobody but their owner can read.
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
        self._handle = os.open(self._temporary, flags, 0o666)

    def write(self, data: bytes | memoryview) -> int:
        """Writes all of `data`; how many bytes that is."""
        rest = memoryview(data).cast("B")
        while rest:
            rest = rest[os.write(self._handle, rest) :]
        return len(data)

    def flush(self) -> None:
        """Nothing is held back; torch.save asks for it."""

    def close(self) -> None:
        """Flushes it to the disk, and closes it."""
        try:
            os.fsync(self._handle)
        finally:
            self._close()

    def commit(self) -> None:
        """Puts it into the place of the other."""
        if self._mode is not None:
            os.chmod(self._temporary, self._mode)
        os.replace(self._temporary, self._target)

    def discard(self) -> None:
        """Removes it, unless it has taken its place."""
        with contextlib.suppress(OSError):
            self._close()
        with contextlib.suppress(OSError):
            os.unlink(self._temporary)

    def _close(self) -> None:
        handle, self._handle = self._handle, -1
        if handle >= 0:
            os.close(handle)


@contextlib.contextmanager
def both(path: str | os.PathLike, beside: str | os.PathLike) -> Iterator[tuple[NewFile, NewFile]]:
    """Two new files for the block to write, which take their places together when it ends well.

    `beside` is the small one, of which the old content is kept for the way back: on any failure
    both are as they were. A kill between the two renames leaves the new `beside` and the old `path`.
    Raises FileError.
    """
    made: list[NewFile] = []
    try:
        old = read_bytes(beside) if os.path.isfile(beside) else None
        made += [NewFile(_target(each)) for each in (path, beside)]
        for file in made:
            file.open()
        yield made[0], made[1]
        for file in made:
            file.close()
        with held_interrupts():
            made[1].commit()
            try:
                made[0].commit()
            except BaseException:
                _restore(beside, old)
                raise
    except OSError as error:
        raise _file_error(path, "written", error) from error
    finally:
        for file in made:
            file.discard()
    _sync_folder(os.path.dirname(path) or os.curdir)


def printable_path(path: str | os.PathLike) -> str:
    """A path as it can be printed on one line of any terminal."""
    text = os.fsdecode(path)
    return text if text.isprintable() and text else ascii(text)


def _target(path: str | os.PathLike) -> str:
    """The file itself where `path` is a link to it: replacing the link would strand the file."""
    target = os.fsdecode(path)
    if os.path.islink(target):
        target = os.path.realpath(target)
        if os.path.islink(target):
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
    return target


def _restore(path: str | os.PathLike, old: bytes | None) -> None:
    if old is None:
        os.unlink(path)
    else:
        _put(_target(path), old)


def _put(target: str, data: bytes) -> None:
    file = NewFile(target)
    try:
        file.open()
        file.write(data)
        file.close()
        file.commit()
    except BaseException:
        file.discard()
        raise
    _sync_folder(os.path.dirname(target) or os.curdir)


def _mode(target: str) -> int | None:
    """The permissions of the file to be replaced; an OSError where open() would refuse it."""
    try:
        found = os.stat(target)
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(found.st_mode):
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
    # To replace a device (/dev/null) or a pipe by a file would break it for everyone.
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "Not a regular file")
    # rename asks only the folder; a file that its owner has locked is to stay.
    if not os.access(target, os.W_OK):
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))
    return stat.S_IMODE(found.st_mode)


def _sync_folder(folder: str) -> None:
    # The file is in place by now. A platform or file system that cannot sync a folder only loses
    # the promise that the new name outlives a power cut, which is no reason to report a failure.
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _file_error(path: str | os.PathLike, done: str, error: OSError | ValueError) -> FileError:
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    wrong = f"cannot be {done}: {' '.join(reason.split())}"
    return FileError(printable_path(path), wrong, _remedy(os.fsdecode(path), error))


def _remedy(path: str, error: OSError | ValueError) -> str:
    code = getattr(error, "errno", None)
    folder, name = os.path.split(path)
    if code == errno.ENOENT and not os.path.isdir(folder or os.curdir):
        return f"there is no folder {printable_path(folder)}"
    if code == errno.ENOENT:
        close = nearest(name, _names(folder or os.curdir))
        return f"did you mean {printable_path(Path(folder, close[0]))}?" if close else ""
    return REMEDIES.get(code, "")


def _names(folder: str) -> list[str]:
    """Some names in the folder; a limit, because a close match is looked for among all of them."""
    try:
        with os.scandir(folder) as entries:
            return [entry.name for entry in islice(entries, 1000)]
    except OSError:
        return []
