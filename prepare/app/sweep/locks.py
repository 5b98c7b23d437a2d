"""Claims: which process runs a job or leads a sweep, on every machine that sees the folder."""

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import cache, partial
from pathlib import Path

from filelock import LeaseSettingsMismatch, SoftFileLease, Timeout

from prepare.core.utils.files import checked_writes
from prepare.core.utils.folders import ask_server
from prepare.core.utils.process_state import runs

# Seconds: a claim is touched so often, may be taken over if it is not for so long, and is looked at so often.
_BEAT, _DEAD, _PAUSE = 3.0, 30.0, 0.1
SUFFIX = ".lease"


class ClaimLost(Exception):  # noqa: N818  names what happened, not an error of anybody
    """Another process took the claim over: this one seemed dead, as it was suspended."""


class Claim:
    """The claim of the name `path`, held from `acquire` to `close`: filelock's lease of `path.lease`.

    On one machine a dead process is known by its id. Elsewhere it is one that does not touch its file while
    another process watches: the clocks of two machines are never compared. It needs neither locks nor links.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._lease = path, _lease(path)

    def acquire(self, *, patience: float = 0.0, watch: bool = True) -> bool:
        """Return True if the claim was acquired within `patience` seconds.

        To take over from a process of another machine that seems dead, `watch` it first, for half a minute.
        Raises OSError if the folder cannot be written.
        """
        start = time.monotonic()
        while True:
            _mend(self._lease.lock_file)
            with suppress(Timeout, LeaseSettingsMismatch):
                self._lease.acquire(timeout=0)
                return True
            waited = time.monotonic() - start
            if waited >= patience and (not watch or waited > 3 * _DEAD or is_held(self.path)):
                return False
            time.sleep(_PAUSE)

    @property
    def check(self) -> Callable[[], None]:
        """The function, which can be pickled, that raises ClaimLost if this claim is not held any more."""
        return partial(_check, self.path, self._lease.token)

    def close(self) -> None:
        """Release the claim; this does nothing in a forked copy of its process."""
        with suppress(OSError):
            self._lease.release()


@contextmanager
def claim(path: Path | None, *, patience: float = 0.0, watch: bool = True) -> Iterator[bool]:
    """Hold the claim of `path` within the block; yield False if another process holds it.

    In the block, files are replaced and removed only while the claim is held: else ClaimLost is raised.
    None needs no claim. If none can be made (a full disk), yield True: what runs in the block will report
    the reason.
    """
    with ExitStack() as stack:
        held = True
        with suppress(OSError):
            if path is not None:
                own = stack.enter_context(closing(Claim(path)))
                if held := own.acquire(patience=patience, watch=watch):
                    stack.enter_context(checked_writes(own.check))
        yield held


def is_held(path: Path, *, patience: float = 0.0) -> bool:
    """Return True if a process seems to hold the claim of `path`, and still after `patience` seconds."""
    deadline = time.monotonic() + patience
    while (held := _seems_held(_lease(path))) and time.monotonic() < deadline:
        time.sleep(_PAUSE)
    return held


def _lease(path: Path) -> SoftFileLease:
    return SoftFileLease(
        f"{path}{SUFFIX}", lease_duration=_DEAD, heartbeat_interval=_BEAT, thread_local=False
    )


def _check(path: Path, token: str | None) -> None:
    for pause in (0.0, _PAUSE):  # who looks whether a claim is dead moves its file for a moment
        time.sleep(pause)
        if (owner := _lease(path).owner) and owner.token == token:
            return
    raise ClaimLost


def _seems_held(lease: SoftFileLease) -> bool:
    with suppress(OSError):
        if (owner := lease.owner) and (owner.hostname != _machine() or runs(owner.pid)):
            touched = os.lstat(lease.lock_file).st_mtime
            return abs(ask_server(Path(lease.lock_file).parent) - touched) <= _DEAD
    return False


def _mend(file: str) -> None:
    """Write a line end into the empty file of a process that was killed before it wrote its record.

    filelock keeps an empty file for ever, and a broken one for two seconds. A process that lives writes its
    record over the line end.
    """
    with suppress(OSError):
        if not os.lstat(file).st_size:
            with Path(file).open("ab") as empty:
                empty.write(b"\n")


@cache
def _machine() -> str:
    """Return the name that filelock gives this machine, or this container of it."""
    with tempfile.TemporaryDirectory() as folder, _lease(Path(folder, "own")) as own:
        return own.owner.hostname if own.owner else ""
