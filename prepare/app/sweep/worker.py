"""One job of a sweep, in a process of any launcher: executed in a child process, unless it is done."""

from __future__ import annotations

import atexit
import os
import pickle
import platform
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from prepare.app.job.execute import JobSpec, run_job
from prepare.app.job.outcome import DONE, FAILED, INTERRUPTED, Outcome, failure, write_result
from prepare.app.job.record import KEPT, Job, Record, Result
from prepare.app.sweep.locks import ClaimLost, claim
from prepare.app.sweep.manifest import SweepManifest, is_led, job_claim
from prepare.core.utils import files
from prepare.core.utils.folders import ask_server
from prepare.core.utils.process_state import Stopped
from prepare.errors import FileError

# Launchers whose jobs go on after the command line that started them has ended.
OUTLIVE_COMMAND = ("submitit_slurm",)
# Seconds between two checks whether the sweep goes on, while a job runs.
_INTERVAL = 0.5
# Seconds that a terminated process has to end.
_PATIENCE = 5.0
_LAST_LINES = 60
_CAUSES: dict[int, str] = {
    signal.SIGKILL: ": out of memory?",
    signal.SIGSEGV: ": a crash in native code",
    signal.SIGABRT: ": native code gave up",
    signal.SIGBUS: ": a crash in native code, or a file that became shorter",
    signal.SIGILL: ": an instruction that this processor does not have",
    signal.SIGFPE: ": a division by zero in native code",
}


def run_in_sweep(
    spec: JobSpec, *, folder: Path, resume: bool, check: Callable[[], None]
) -> Outcome | None:
    """Execute the job, unless it is done; return None if another process is executing it.

    `folder` is that of the sweep: with `resume` the job may have been done anywhere in it. `check` is
    as in `run_isolated`.
    """
    job, record = spec.job, Record(spec.folder)
    # Most jobs of a sweep that is resumed: this leaves no claim behind.
    if job.identity and (result := _kept(job, record)):
        return Outcome(result, DONE)
    name = job_claim(folder, job.identity) if job.identity else None
    with claim(name) as held:
        if not held:
            return None
        may_write = files.check_of_writes()

        def check_both() -> None:
            may_write()
            check()

        try:
            if name is not None:
                ask_server(record.folder)
            # Only now: the process that held the claim before may just have done the job.
            if job.identity and (result := _done(job, record, folder, resume=resume)):
                return Outcome(result, DONE)
            outcome = run_isolated(replace(spec, check_writes=may_write), check_both)
            may_write()  # the result that was read may be another process's
        except ClaimLost:
            return None
        return outcome


def stop_check(
    folder: Path, manifest: SweepManifest, *, outlives_command: bool
) -> Callable[[], None]:
    """Return a function that raises Stopped if the command line that started the sweep has ended.

    It never raises for a sweep of another machine, whose processes cannot be seen here, or if the job
    `outlives_command`.
    """
    watched = manifest.host == platform.node() and not outlives_command

    def check() -> None:
        if watched and not is_led(folder):
            raise Stopped("its sweep was stopped")

    return check


def _done(job: Job, record: Record, folder: Path, *, resume: bool) -> Result | None:
    """Return the result that need not be repeated; else remove what the job left under other numbers."""
    elsewhere = sorted(folder.rglob("job.json")) if resume else []
    for other in (record, *(Record(path.parent) for path in elsewhere)):
        if result := _kept(job, other):
            return result
        with suppress(FileError):
            if other.folder != record.folder and other.is_of(job):
                other.remove()
    return None


def _kept(job: Job, record: Record) -> Result | None:
    """Return the result of this job in a record, if it need not be repeated."""
    with suppress(FileError):
        if record.is_of(job) and (result := record.result()) and result.status in KEPT:
            return result
    return None


def shares_cores(launcher: str | None, launching: Mapping[str, Any]) -> bool:
    """Return True if several jobs run at once on one machine, so that each disturbs the others' timings."""
    if launcher == "joblib":
        return launching.get("n_jobs") != 1
    # Slurm gives each job its own cores. For an unknown launcher, assume the worst.
    return launcher not in ("basic", "submitit_slurm")


def exit_with_parent(parent: int) -> None:
    """End this process soon after its parent: a joblib worker would wait for jobs that never come."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_INTERVAL)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def run_isolated(spec: JobSpec, check: Callable[[], None]) -> Outcome:
    """Execute one job in a child process and write its record; raises nothing but ClaimLost.

    It is `prepare.app.job.execute.run_job`, except that a crash of the job ends only its child process.
    `check` is called at intervals, and raises if the job shall be stopped. If it raises ClaimLost, the
    record is another process's by now, and nothing is written.
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
    except ClaimLost:
        raise
    except BaseException as error:  # a job must not end the other jobs of a sweep
        # A result is written last: an error after it has not changed the record.
        with suppress(Exception):
            if result := record.result():
                return replace(failure(error), result=result)
        outcome = failure(error)
    seconds = round(time.perf_counter() - start, 3)
    return write_result(replace(outcome, result=replace(outcome.result, seconds=seconds)), record)


class _ForkServer:
    """A child process that has imported torch and forks once for every job."""

    def __init__(self, preload: tuple[str, ...]) -> None:
        own_end, server_end = socket.socketpair()
        with server_end:
            self._process = _start_server(server_end.fileno(), preload)
        self._connection = Connection(own_end.detach())
        self._job = 0
        atexit.register(self.close)

    def run(self, log: Path, spec: JobSpec, check: Callable[[], None]) -> int:
        """Execute the job in a child process; return the exit status of that process."""
        try:
            self._connection.send((str(log), pickle.dumps(spec)))
            self._job = self._receive(check)
            status = self._receive(check)
        except (EOFError, ConnectionError) as error:
            self.close()
            code = self._process.returncode
            wrong = f"the process that starts the runs has ended, with exit code {code}"
            raise RuntimeError(wrong) from error
        except BaseException:
            self.close()
            raise
        self._job = 0
        return status

    def close(self) -> None:
        """End the server, and the job that it runs."""
        _server.cache_clear()
        atexit.unregister(self.close)
        self._connection.close()
        # The server obeys this until it has imported torch; after that, it sees the closed connection.
        self._process.terminate()
        try:
            self._process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._job and self._process.returncode:  # else the server has killed the job
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._job, signal.SIGKILL)

    def _receive(self, check: Callable[[], None]) -> int:
        while not self._connection.poll(_INTERVAL):
            check()
        return self._connection.recv()


def _start_server(handle: int, preload: tuple[str, ...]) -> subprocess.Popen:
    code = (
        f"import sys; sys.path[:] = {sys.path!r}; from prepare.app.sweep.fork_server import serve"
    )
    code += f"; serve({handle}, {list(preload)!r})"
    # typeshed leaves it out; multiprocessing uses it as well.
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    # In a new session: Ctrl-C reaches only this process, which then ends the server.
    return subprocess.Popen(  # noqa: S603
        [sys.executable, *flags, "-c", code],
        pass_fds=[handle],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )


@cache
def _server(_process: int, preload: tuple[str, ...]) -> _ForkServer:
    """Return the server of this process; a forked copy of this process must start another one."""
    return _ForkServer(preload)


def _crash(status: int, log: Path) -> Result:
    """Return the result of a job that wrote none: its exit status in words, and the end of its log."""
    code, lines = os.waitstatus_to_exitcode(status), []
    if code < 0:
        name = next((each.name for each in signal.Signals if each == -code), f"signal {-code}")
        reason, error = "killed", f"killed by {name}{_CAUSES.get(-code, '')}"
    else:
        reason, error = "exit", f"the run ended its process with exit code {code}, as os._exit does"
    with suppress(OSError):
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return Result("crashed", reason, error, "\n".join(lines[-_LAST_LINES:]) or None)
