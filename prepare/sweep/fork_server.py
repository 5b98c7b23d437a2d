"""The process in which the jobs of a sweep run: it loads torch once, and a copy of it does each job."""

from __future__ import annotations

import faulthandler
import importlib
import os
import pickle
import signal
import sys
import threading
import traceback
import warnings
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from prepare.job.execute import run_job

if TYPE_CHECKING:
    from prepare.job.spec import JobSpec

# What takes long to import, and every job needs.
_PRELOADED = (
    *(
        "torch",
        "torch.utils._device",
        "prepare.job.build_model",
        "prepare.core.forward.torch_state",
        "prepare.job.analyses",
    ),
    *(
        "prepare.pipeline",
        "prepare.audit",
        "prepare.audit.read_model",
        "prepare.core.forward.input_formatter",
        "prepare.job.load_weights",
    ),
    *(
        "prepare.core.forward.run_example",
        "prepare.core.forward.conv_layouts",
        "prepare.core.utils.environment",
    ),
    *("prepare.flow.follow", "prepare.verify.check_model"),
    *("prepare.bench.session", "prepare.bench.model_state"),
)
# Of what a job prints, this much from its beginning is kept, and as much from its end.
_HALF = 1 << 19


def serve(handle: int, preload: list[str]) -> None:
    """Execute the jobs that come through the socket `handle`, until its other end is closed.

    A request is a pair: the path of a log, and a pickled `JobSpec`. The answers are the id of the process
    that does it, and its exit status. A process that is not there any more closes its end: what runs
    for it is killed then, with all that it started.
    """
    for name in (*_PRELOADED, *preload):
        module = importlib.import_module(name)
        # One may have more to load than its imports.
        getattr(module, "get_ready", lambda: None)()
    # Until here a signal may end this process; from now on it has a child to take along.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    asked, wake = Connection(handle), _waking_pipe()
    with suppress(EOFError, OSError):
        while True:
            log, pickled = asked.recv()
            output, theirs = os.pipe()
            lived, lives = os.pipe()
            if not (pid := _fork()):
                asked.close()
                os.close(lives)
                _do(pickled, theirs, lived)
            os.close(theirs)
            os.close(lived)
            try:
                asked.send(pid)
            finally:
                status = _watched(pid, asked, wake, output, _Log(log))
                os.close(lives)
            asked.send(status)


def _waking_pipe() -> int:
    """A handle to read from when a child has ended."""
    wake, woken = os.pipe()
    for handle in (wake, woken):
        os.set_blocking(handle, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    return wake


def _fork() -> int:
    with warnings.catch_warnings():
        # NumPy's threads are there from its import on, and know of forks; Python 3.12 does not know that.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _do(pickled: bytes, output: int, lived: int) -> NoReturn:
    code = 1
    try:
        os.setpgid(0, 0)
        threading.Thread(target=_end_with, args=(lived,), daemon=True).start()
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        for handle, name in enumerate(("stdout", "stderr"), start=1):
            os.dup2(output, handle)
            # New ones: those of before may not be turned from a file to a pipe.
            stream = open(handle, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)
        faulthandler.enable(2)
        spec: JobSpec = pickle.loads(pickled)  # noqa: S301  sent by the process that started this one
        spec.enter()
        run_job(spec, begun=True)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        # Not by way of the interpreter's end: what a library does there may hang or crash, and all is done.
        os._exit(code)


def _end_with(lived: int) -> None:
    """Ends this job, and what it has started, when the process that `lived` comes from is killed."""
    os.read(lived, 1)
    _kill(os.getpgid(0))


def _watched(pid: int, asked: Connection, wake: int, output: int, log: _Log) -> int:
    """The exit status of a job; writes down what it prints until then.

    Raises:
        EOFError: whoever asked for it has gone, and the job was killed.
    """
    with suppress(OSError):  # it may have done so itself
        os.setpgid(pid, pid)
    listened: list[Any] = [asked, wake, output]
    os.set_blocking(output, False)
    try:
        while True:
            ready = wait(listened)
            if wake in ready:
                with suppress(BlockingIOError):
                    os.read(wake, 4096)
            if output in ready and not log.copy(output):
                listened.remove(output)
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                return status
            if asked in ready:
                raise EOFError
    except BaseException:
        _kill(pid)
        os.waitpid(pid, 0)
        raise
    finally:
        _kill(pid)  # what the job itself has started and not ended
        log.copy(output)
        log.close()
        os.close(output)


def _kill(group: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


class _Log:
    """The file of what a job prints: its beginning as it comes, its end at the end, and no more."""

    def __init__(self, path: str) -> None:
        self._path, self._written = path, 0
        self._last, self._more = bytearray(), 0

    def copy(self, output: int) -> bool:
        """Takes what can be read now; whether there may be more."""
        with suppress(BlockingIOError):
            while data := os.read(output, 1 << 16):
                first = data[: _HALF - self._written]
                self._append(first)
                self._written += len(first)
                self._more += len(data) - len(first)
                self._last += data[len(first) :]
                del self._last[:-_HALF]
            return False
        return True

    def close(self) -> None:
        """Writes the end, if it has not been written as it came."""
        if left_out := self._more - len(self._last):
            self._append(f"\n... {left_out:,} bytes left out ...\n".encode())
        self._append(bytes(self._last))

    def _append(self, data: bytes) -> None:
        # A disk that is full is told by what the job itself writes.
        with suppress(OSError):
            if data:
                with Path(self._path).open("ab") as file:
                    file.write(data)
