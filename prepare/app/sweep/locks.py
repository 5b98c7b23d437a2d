"""Claims: which process runs a job or leads a sweep, on every machine that sees the folder."""

from __future__ import annotations

import os
import platform
import secrets
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

from prepare.core.utils.files import TEMPORARY

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]  # typeshed has no None for a missing module

# Seconds: a claim is touched so often, and its process is dead if it is not touched for so long.
_BEAT, _DEAD = 3.0, 30.0
_PAUSES = 0.01, 0.25
_ENDED = "ended\n"


class ClaimLost(Exception):  # noqa: N818  names what happened, not an error of anybody
    """Another process took the claim over: this one seemed dead, as it was suspended."""


class Claim:
    """The claim of the name `path`, held from `acquire` to `close`.

    It is a file `path.0`, which only one process can create, and which it touches while it lives.
    Once that says that it has ended, or its process is dead, one process creates `path.1` in the same way,
    and so on: the highest number counts. A file that was removed could be created twice, so none is.

    On one machine a dead process is known by its id. Elsewhere it is one that does not touch its file while
    another process watches: the clocks of two machines are never compared to decide this. It needs no locks.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.lost = False
        self.number = -1
        self.path, self._process = path, os.getpid()
        self._ended = threading.Event()

    def acquire(self, *, patience: float = 0.0, watch: bool = True) -> bool:
        """Return True if the claim was acquired within `patience` seconds.

        To take over from a process of another machine that seems dead, `watch` it first, for half a minute.
        Raises OSError if the folder cannot be written.
        """
        for _ in _until(patience):
            found = _highest(self.path)
            if found is None:
                if self._create(0):
                    return True
            elif _is_dead(found, watch=watch):
                _end(found.file)  # its process, if it is not dead after all, then stops
                if self._create(found.number + 1):
                    return True
        return False

    def close(self, *, remove: bool = False) -> None:
        """Release the claim; `remove` its file, if the name is used only once."""
        self._ended.set()
        if self.number >= 0 and self._process == os.getpid():
            file = _file(self.path, self.number)
            with suppress(OSError):
                if remove:
                    file.unlink()
                else:
                    _end(file)

    def _create(self, number: int) -> bool:
        file, draft = _file(self.path, number), _temporary(self.path.parent)
        text = f"{_machine()}\n{self._process}\n{_birth(self._process) or ''}\n"
        try:
            # On a full disk it stays empty; then only its time shows that its process lives.
            with suppress(OSError), draft.open("x", encoding="utf-8") as opened:
                opened.write(text)
            # A link appears with its text in it: a kill leaves no claim that names no process.
            try:
                os.link(draft, file)
            except FileExistsError:
                if not file.samefile(draft):  # NFS may send the request again, after it was granted
                    return False
            except OSError:  # a file system without links
                with file.open("x", encoding="utf-8") as opened, suppress(OSError):
                    opened.write(text)
        except FileExistsError:
            return False
        finally:
            with suppress(OSError):
                draft.unlink()
        self.number = number
        threading.Thread(target=self._beat, daemon=True).start()
        return True

    def _beat(self) -> None:
        while not self._ended.wait(_BEAT):
            found = _read(self.path, self.number)
            self.lost = found is None or found.text.startswith(_ENDED)
            if self.lost:
                return
            with suppress(OSError):
                os.utime(_file(self.path, self.number))


@contextmanager
def claim(path: Path | None, *, watch: bool = True) -> Iterator[Claim | bool]:
    """Hold the claim of `path` within the block; yield False if another process holds it.

    None needs no claim. If none can be made (a full disk), yield True: what runs in the block will report
    the reason.
    """
    held: Claim | bool = path is None
    try:
        if path is not None:
            with suppress(OSError):
                held = True
                own = Claim(path)
                held = own.acquire(watch=watch) and own
        yield held
    finally:
        if isinstance(held, Claim):
            held.close()


def is_held(path: Path, *, patience: float = 0.0) -> bool:
    """Return True if a process seems to hold the claim of `path`, and still after `patience` seconds."""
    for _ in _until(patience):
        found = _highest(path)
        if found is None or _is_dead(found, watch=False) is not False:
            return False
    return True


def names_in(folder: Path) -> list[Path]:
    """Return the names in a folder that were ever claimed."""
    with suppress(OSError):
        return sorted({file.with_suffix("") for file in folder.iterdir() if file.suffix})
    return []


def ask_server(folder: Path) -> float:
    """Return the time of the file server, in seconds: that of a new file in `folder`.

    A client of NFS that has made a file in a folder also notices what others have made there; without
    that, it may believe for a minute that a new file is missing.
    """
    file = _temporary(folder)
    try:
        with file.open("xb") as opened:
            return os.fstat(opened.fileno()).st_mtime
    except OSError:  # a folder to which this process may not write
        return time.time()
    finally:
        with suppress(OSError):
            file.unlink()


@contextmanager
def hold_folder(folder: Path) -> Iterator[bool]:
    """Lock an existing folder within the block; yield False if another process of this machine has.

    This leaves no file in it. Without such locks (Windows, some network folders) it always yields True.
    """
    handle = -1
    try:
        held = True
        if fcntl is not None:
            with suppress(OSError):
                folder.mkdir(parents=True, exist_ok=True)
                handle = os.open(folder, os.O_RDONLY)
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    held = False
        yield held
    finally:
        if handle >= 0:
            os.close(handle)


class _Found(NamedTuple):
    """A file of a claim: its number, its text, and the time at which it was touched."""

    file: Path
    number: int
    text: str
    touched: float


def _file(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}")


def _temporary(folder: Path) -> Path:
    return folder / f".{secrets.token_hex(8)}{TEMPORARY}"


def _read(path: Path, number: int) -> _Found | None:
    """Read a file of a claim; it is opened, as only that makes a client of NFS ask the server."""
    file = _file(path, number)
    try:
        with file.open("rb") as opened:
            text = opened.read(1 << 12).decode("utf-8", "replace")
            return _Found(file, number, text, os.fstat(opened.fileno()).st_mtime)
    except OSError:
        return None


def _highest(path: Path) -> _Found | None:
    found, following = None, _read(path, 0)
    while following is not None:
        found, following = following, _read(path, following.number + 1)
    return found


def _end(file: Path) -> None:
    with suppress(OSError):
        handle = os.open(file, os.O_WRONLY)
        try:
            os.write(handle, _ENDED.encode())
        finally:
            os.close(handle)


def _is_dead(found: _Found, *, watch: bool) -> bool | None:
    """Return whether a claim has ended or its process is dead; None if it seems so without a `watch`."""
    if found.text.startswith(_ENDED):
        return True
    machine, process, born, *_ = [*found.text.split("\n"), "", "", ""]
    if machine == _machine() and process.isdigit():
        birth = _birth(int(process))
        if birth is None or (born and birth and born != birth):
            return True
        if born and birth:
            return False
    if abs(ask_server(found.file.parent) - found.touched) <= _DEAD:
        return False
    return not _is_touched(found) if watch else None


def _is_touched(found: _Found) -> bool:
    """Watch a claim, until it is touched or has not been for a time measured here."""
    quiet = 0.0
    while quiet < _DEAD:
        time.sleep(_BEAT)
        start = time.monotonic()
        if _read(found.file.with_suffix(""), found.number) != found:
            return True
        # A server that did not answer kept the other machine from it as well.
        quiet = quiet + _BEAT if time.monotonic() - start < _BEAT else 0.0
    return False


@cache
def _machine() -> str:
    """Return what distinguishes this machine, since it was started, and its container from all others."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        processes = os.readlink("/proc/self/ns/pid")  # noqa: PTH115  not a path
    except OSError:  # not Linux
        return f"{platform.node()} {uuid.getnode():x}"
    return f"{platform.node()} {boot} {processes}"


def _birth(process: int) -> str | None:
    """Return when a process of this machine was started; "" if that is unknown, None if it has ended."""
    if os.name != "posix":
        return ""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return None
    except PermissionError:  # of another user
        return ""
    with suppress(OSError, IndexError):
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return None if fields[0] in "ZX" else fields[19]
    return ""


def _until(patience: float) -> Iterator[None]:
    """Yield once, and then at intervals until `patience` seconds have passed."""
    deadline, pause = time.monotonic() + patience, _PAUSES[0]
    yield
    while (remaining := deadline - time.monotonic()) > 0:
        time.sleep(min(pause, remaining))
        pause = min(2 * pause, _PAUSES[1])
        yield
