"""Runs a job in a process of its own, and tells how that ended where the job itself could not."""

from __future__ import annotations

import atexit
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

from prepare.job.execute import run_job
from prepare.job.outcome import FAILED, INTERRUPTED, Outcome, failure, write_result
from prepare.job.record import Record, Result

if TYPE_CHECKING:
    from prepare.job.spec import JobSpec

# How often it is asked whether the sweep goes on, while a job runs.
_TICK = 0.5
# How long a process may take to end that has been told to.
_PATIENCE = 5.0
_LAST_LINES = 60
_MEANING = {
    signal.SIGKILL: ": out of memory?",
    signal.SIGSEGV: ": a crash in native code",
    signal.SIGABRT: ": native code gave up",
    signal.SIGBUS: ": a crash in native code, or a file that became shorter",
    signal.SIGILL: ": an instruction that this processor does not have",
    signal.SIGFPE: ": a division by zero in native code",
}


def run_isolated(spec: JobSpec, check: Callable[[], None]) -> Outcome:
    """Execute one job in a child process and write its record; never raises.

    It is `prepare.job.execute.run_job`, except that a crash of the job ends only its child process.
    `check` is called at intervals, and raises if the job shall be stopped.
    With `isolate=false`, or without fork (Windows), the job runs in this process.
    """
    record = Record(spec.folder)
    start = time.perf_counter()
    try:
        record.begin(spec.job)
        if not (spec.settings().isolate and hasattr(os, "fork")):
            return run_job(spec, begun=True)
        log = record.folder / "log.txt"
        preload = tuple(sorted({spec.build.__module__, spec.pages.__module__}))
        status = _server(os.getpid(), preload).run(log, spec, check)
        if result := record.result():
            return Outcome(result, INTERRUPTED if result.status == "interrupted" else FAILED)
        outcome = Outcome(_crash(status, log), FAILED)
    except BaseException as error:  # one job may not take the others of a sweep along
        # A result is written last, so whatever came after it has spoilt nothing.
        with suppress(Exception):
            if result := record.result():
                return replace(failure(error), result=result)
        outcome = failure(error)
    seconds = round(time.perf_counter() - start, 3)
    return write_result(replace(outcome, result=replace(outcome.result, seconds=seconds)), record)


class _Server:
    """The process that holds torch and makes a copy of itself for every job."""

    def __init__(self, preload: tuple[str, ...]) -> None:
        ours, theirs = socket.socketpair()
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; from prepare.sweep.fork_server import serve"
        )
        code += f"; serve({theirs.fileno()}, {list(preload)!r})"
        flags = subprocess._args_from_interpreter_flags()
        with theirs:
            # In a session of its own, so that Ctrl-C reaches this process only, which then ends that one.
            self._process = subprocess.Popen(  # noqa: S603
                [sys.executable, *flags, "-c", code],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._connection = Connection(ours.detach())
        self._child = 0
        atexit.register(self.close)

    def run(self, log: Path, spec: JobSpec, check: Callable[[], None]) -> int:
        """Execute the job in a child process; return the exit status of that process."""
        try:
            self._connection.send((str(log), pickle.dumps(spec)))
            self._child = self._answer(check)
            status = self._answer(check)
        except (EOFError, ConnectionError) as error:
            self.close()
            code = self._process.returncode
            wrong = f"the process that starts the jobs has ended, with exit code {code}"
            raise RuntimeError(wrong) from error
        except BaseException:
            self.close()
            raise
        self._child = 0
        return status

    def close(self) -> None:
        """Ends it, and with it the job that it runs."""
        _server.cache_clear()
        atexit.unregister(self.close)
        self._connection.close()
        # Heeded until it has loaded torch; then it sees that the connection is closed.
        self._process.terminate()
        try:
            self._process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._child and self._process.returncode:  # else it has done so itself
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._child, signal.SIGKILL)

    def _answer(self, check: Callable[[], None]) -> int:
        while not self._connection.poll(_TICK):
            check()
        return self._connection.recv()


@cache
def _server(_process: int, preload: tuple[str, ...]) -> _Server:
    """That of this process: one that was forked from another may not use what belongs to it."""
    return _Server(preload)


def _crash(status: int, log: Path) -> Result:
    """How a job ended that left no result: in words, and with the last that it printed."""
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        reason, error = "killed", f"killed by {_name(-code)}{_MEANING.get(-code, '')}"
    else:
        reason, error = "exit", f"the job ended its process with exit code {code}, as os._exit does"
    return Result("crashed", reason, error, _last_lines(log))


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _last_lines(log: Path) -> str | None:
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    return "\n".join(lines[-_LAST_LINES:]) or None
