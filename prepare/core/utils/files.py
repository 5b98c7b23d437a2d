"""Read files, and write them whole or not at all, with errors that a user can act on.

A write goes to a temporary file in the same folder, which is flushed to the disk and then takes
the place of the old file in one operation. A failure, an interrupt or a kill at any moment leaves
the old file or the new one, never a part of either. Only a kill can leave the temporary behind;
its name ends in `.prepare-tmp`, and names the process, so that the next one knows that it has ended.

A folder may come from somebody else: a link in the place of a file is replaced and not followed, so
that nothing outside of the folder is written, and only regular files are opened, so that nothing waits.
"""

import contextlib
import errno
import hashlib
import os
import platform
import secrets
import stat
from collections.abc import Iterator
from functools import cache
from itertools import islice
from pathlib import Path

from prepare.core.utils.signals import runs
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
    """Replace the content of the file at `path` by `data`, or change nothing.

    The file gets the permissions that `open(path, "w")` would give: those of the file it replaces,
    else what the umask leaves. A symbolic link is replaced, not followed. Raises FileError.
    """
    with new_file(path) as file:
        file.write(data)


def write_text(path: str | os.PathLike, text: str) -> None:
    r"""Replace the content of the file at `path` by `text` in UTF-8, without translating line ends.

    A module may be named by any string, so lone surrogates are written ("surrogatepass"), and
    `read_text` returns them. Strict readers refuse such bytes: formats that can escape them (JSON,
    recipes, pages) do so before. Raises FileError.
    """
    write_bytes(path, text.encode("utf-8", "surrogatepass"))


def read_bytes(path: str | os.PathLike, *, limit: int | None = None) -> bytes:
    """Return the content of the file at `path`; raise FileError, also if it exceeds `limit` bytes.

    At most `limit` + 1 bytes are read, so a huge file does no harm.
    """
    try:
        with open(path, "rb", opener=open_regular) as file:
            large = limit is not None and os.fstat(file.fileno()).st_size > limit
            data = b"" if large else file.read() if limit is None else file.read(limit + 1)
    except (OSError, ValueError) as error:
        raise _file_error(path, "read", error) from error
    if large or (limit is not None and len(data) > limit):
        raise FileError(
            printable_path(path), f"is larger than {limit:,} bytes", "give a smaller file"
        )
    return data


def read_text(path: str | os.PathLike, *, limit: int | None = None) -> str:
    """Return the text of the UTF-8 file at `path`, as `write_text` wrote it; raise FileError."""
    data = read_bytes(path, limit=limit)
    try:
        return data.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        wrong = f"is not UTF-8 text (byte {error.start:,})"
        raise FileError(printable_path(path), wrong, "save it as UTF-8") from error


def is_file(path: str | os.PathLike) -> bool:
    """Return whether this is a regular file; `Path.is_file` raises if the name is too long."""
    return os.path.isfile(path)


def is_folder(path: str | os.PathLike) -> bool:
    """Return whether this is a folder; `Path.is_dir` raises if the name is too long."""
    return os.path.isdir(path)


def open_regular(path: str, flags: int) -> int:
    """Open a regular file, as the `opener` of `open`; raise OSError at once for a pipe or a device."""
    # Without the flag, opening a pipe waits for its other end.
    handle = os.open(path, flags | getattr(os, "O_NONBLOCK", 0), 0o666)
    try:
        _check_regular(os.fstat(handle).st_mode)
    except OSError:
        os.close(handle)
        raise
    return handle


def open_unlinked(path: str, flags: int) -> int:
    """Open a regular file as `open_regular` does; raise OSError for a symbolic link."""
    return open_regular(path, flags | getattr(os, "O_NOFOLLOW", 0))


class NewFile:
    """A temporary file in the folder of `target`, which replaces `target` in one operation."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._mode = _mode(target)
        self._folder, name = os.path.dirname(target) or os.curdir, os.path.basename(target)
        self._prefix = f".{_digest(name)}-{_machine()}-"
        # The name is set before the file exists, so it can be removed after an interrupt at any moment.
        own = f"{self._prefix}{os.getpid()}-{secrets.token_hex(8)}{TEMPORARY}"
        self.temporary = os.path.join(self._folder, own)
        self._handle = -1

    def open(self) -> None:
        """Create the file."""
        # os.open and not tempfile: mkstemp makes files that only their owner can read.
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
        self._handle = os.open(self.temporary, flags, 0o666)

    def remove_stale(self) -> None:
        """Remove what killed processes of this machine left when they wrote the same target."""
        with contextlib.suppress(OSError), os.scandir(self._folder) as entries:
            for name in [each.name for each in entries if each.name.startswith(self._prefix)]:
                process = name.removeprefix(self._prefix).partition("-")[0]
                if name.endswith(TEMPORARY) and process.isdigit() and not runs(int(process)):
                    os.unlink(os.path.join(self._folder, name))

    def write(self, data: bytes | memoryview) -> int:
        """Write all of `data` and return its number of bytes."""
        rest = memoryview(data).cast("B")
        while rest:
            rest = rest[os.write(self._handle, rest) :]
        return len(data)

    def close(self) -> None:
        """Flush the file to the disk and close it."""
        try:
            os.fsync(self._handle)
        finally:
            self._close()

    def commit(self) -> None:
        """Replace the target by this file."""
        if self._mode is not None:
            os.chmod(self.temporary, self._mode)
        os.replace(self.temporary, self._target)

    def discard(self) -> None:
        """Remove the file, unless it has replaced its target."""
        with contextlib.suppress(OSError):
            self._close()
        with contextlib.suppress(OSError):
            os.unlink(self.temporary)

    def _close(self) -> None:
        handle, self._handle = self._handle, -1
        if handle >= 0:
            os.close(handle)


@contextlib.contextmanager
def new_file(path: str | os.PathLike) -> Iterator[NewFile]:
    """Yield a new file to write, which replaces `path` if the block succeeds. Raises FileError."""
    try:
        file = NewFile(os.fsdecode(path))
        try:
            file.open()
            yield file
            file.close()
            file.commit()
        finally:
            file.discard()
    except (OSError, ValueError) as error:
        raise _file_error(path, "written", error) from error
    _sync_folder(os.path.dirname(os.fsdecode(path)) or os.curdir)


def missing_remedy(path: str | os.PathLike) -> str:
    """Return what to do about a path that does not exist: the folder that is missing, or a similar name."""
    folder, name = os.path.split(os.fsdecode(path))
    try:
        with os.scandir(folder or os.curdir) as entries:
            # The search for a close match takes time for each name.
            close = nearest(name, [entry.name for entry in islice(entries, 1000)])
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return f"there is no folder {printable_path(folder)}"
    except OSError:
        return ""
    return f"did you mean {printable_path(Path(folder, close[0]))}?" if close else ""


def printable_path(path: str | os.PathLike) -> str:
    """Return a path as it can be printed on one line of any terminal."""
    text = os.fsdecode(path)
    return text if text.isprintable() and text else ascii(text)


def _digest(text: str) -> str:
    return hashlib.sha256(os.fsencode(text)).hexdigest()[:8]


@cache
def _machine() -> str:
    """Return what distinguishes the processes of this machine, or of its container, from all others."""
    facts = [platform.node()]
    with contextlib.suppress(OSError):
        facts.append(os.readlink("/proc/self/ns/pid"))
        facts.append(Path("/proc/sys/kernel/random/boot_id").read_text())
    return _digest(" ".join(facts))


def _mode(target: str) -> int | None:
    """Return the permissions of the file to replace, or None; raise OSError where open() would."""
    try:
        status = os.stat(target)
    except FileNotFoundError:
        return None
    except ValueError as error:  # a null byte
        raise OSError(errno.EINVAL, str(error)) from error
    _check_regular(status.st_mode)
    if os.path.islink(target):
        return None
    # rename checks only the folder; a write-protected file must stay.
    if not os.access(target, os.W_OK):
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))
    return stat.S_IMODE(status.st_mode)


def _check_regular(mode: int) -> None:
    if stat.S_ISDIR(mode):
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
    # Replacing a device (/dev/null) or a pipe by a file would break it for other programs.
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "Not a regular file")


def _sync_folder(folder: str) -> None:
    # The file is in place by now. Where a folder cannot be synced, the new name may not survive a
    # power cut, which is not a reason to report a failure.
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
    code = getattr(error, "errno", None) or 0
    return missing_remedy(path) if code == errno.ENOENT else REMEDIES.get(code, "")
