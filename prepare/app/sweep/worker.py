"""One run of a sweep, in a process of any launcher: executed in a child process, unless it is done.

What does not work: a thread for each run (a crash ends all), `subprocess` (each imports torch, 1.3 s), and
a fork of the command itself (its threads and its open files go along). So `multiprocessing` starts a server
once, which has imported torch, and forks it for each run.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import platform
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from prepare.app.job.execute import JobSpec, Outcome, failure, run_job, write_result
from prepare.app.job.record import KEPT, Job, Record, Result
from prepare.app.sweep.leader import OUTLIVE_COMMAND, stamp
from prepare.core.utils.process_state import Stopped
from prepare.errors import FileError
from prepare.stages.stage import DONE, FAILED, INTERRUPTED, ordered_stages

if TYPE_CHECKING:
    from prepare.app.sweep.manifest import SweepManifest

# Slow to import, and every run needs them, beside what its stages import.
_PRELOADED = (
    *("torch", "torch.utils._device", "hydra.utils", "prepare.app.job.run_stages"),
    *(
        "prepare.app.report.pages",
        "prepare.audit.read_model",
        "prepare.core.forward.input_formatter",
    ),
)
# Seconds between two looks whether the sweep goes on, and that a killed run has to end.
_INTERVAL, _PATIENCE = 0.5, 5.0
# Of what a crashed run printed last.
_LAST_LINES, _LAST_BYTES = 60, 1 << 16
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def run_in_sweep(spec: JobSpec, *, folder: Path, manifest: SweepManifest, resume: bool) -> Outcome:
    """Execute the job, unless it is done: with `resume` anywhere in `folder`, which is that of the sweep.

    Raises:
        Stopped: the command that leads the sweep has ended.
        KeyboardInterrupt: the job was interrupted.
    """
    watched = manifest.host == platform.node() and spec.job.launcher not in OUTLIVE_COMMAND
    leader = stamp(folder) if watched else None

    def check() -> None:
        if watched and (leader is None or stamp(folder) != leader):
            raise Stopped("its sweep was stopped")

    check()
    if resume and (result := _done(spec.job, Record(spec.folder), folder)):
        return Outcome(result, DONE)
    outcome = run_isolated(spec, check)
    if outcome.code == INTERRUPTED:
        check()
        raise KeyboardInterrupt
    return outcome


def _done(job: Job, own: Record, folder: Path) -> Result | None:
    """Return the result of this job that need not be repeated, under any number."""
    others = (Record(path.parent) for path in sorted(folder.rglob("job.json")))
    for record in (own, *others):
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

    # joblib's own way to start processes is unknown to the child that a run gets.
    multiprocessing.set_start_method(None, force=True)
    threading.Thread(target=watch, daemon=True).start()


def run_isolated(spec: JobSpec, check: Callable[[], None]) -> Outcome:
    """Execute one job in a child process and write its record; a crash ends only the child. Raises nothing.

    `check` is called at intervals, and raises if the job shall be stopped. With `isolate=false`, or without
    fork (Windows), the job runs in this process.
    """
    record, start = Record(spec.folder), time.perf_counter()
    try:
        record.begin(spec.job)
        if spec.config.get("isolate") is False or not hasattr(os, "fork"):
            return run_job(spec, begun=True)
        outcome = Outcome(_execute_in_child(spec, record.folder / "log.txt", check), FAILED)
    except BaseException as error:  # a job must not end the other jobs of a sweep
        outcome = failure(error)
    with suppress(FileError):
        if result := record.result():
            stopped = outcome.code == INTERRUPTED or result.status == "interrupted"
            return Outcome(result, INTERRUPTED if stopped else FAILED)
    seconds = round(time.perf_counter() - start, 3)
    return write_result(replace(outcome, result=replace(outcome.result, seconds=seconds)), record)


def _execute_in_child(spec: JobSpec, log: Path, check: Callable[[], None]) -> Result:
    """Execute the job; return the result of one that leaves none."""
    context = multiprocessing.get_context("forkserver")
    stages = (each for cls in ordered_stages() if cls.default for each in cls.imports)
    context.set_forkserver_preload([*_PRELOADED, *stages])
    child = context.Process(target=_execute, args=(spec, str(log)))
    try:
        with _alone():
            child.start()
        while child.exitcode is None:
            child.join(_INTERVAL)
            check()
    finally:
        if child.pid is not None:
            child.kill()  # if it shall stop
            _kill(child.pid)  # what it started and did not end
            child.join(_PATIENCE)
    with suppress(OSError):
        if not log.stat().st_size:
            log.unlink()
    return _crash(child.exitcode or 0, log)


@contextmanager
def _alone() -> Iterator[None]:
    """Start processes that Ctrl-C of the terminal does not reach, and that do not run the main script again.

    They inherit that the signals are blocked: a run accepts them when it has a group of its own. The server
    has to import the same packages; Python 3.11 does not tell it from where.
    """
    path = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    main, before = sys.modules["__main__"], signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
        del os.environ["PYTHONPATH"]
        if path is not None:
            os.environ["PYTHONPATH"] = path
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _execute(spec: JobSpec, log: str) -> None:
    gc.freeze()  # no run walks over what the server has loaded, or copies its pages for that
    os.setpgid(0, 0)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for number, name in enumerate(("stdout", "stderr"), start=1):
        os.dup2(handle, number)
        stream = open(number, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    faulthandler.enable()
    spec.enter()
    run_job(spec, begun=True)
    sys.stdout.flush()
    sys.stderr.flush()
    # Skip the interpreter's shutdown: the record is complete, and a library may hang or crash there.
    os._exit(0)


def _end_with_parent() -> None:
    """Kill this job, and what it started, when the process that asked for it has ended."""
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
        _kill(os.getpgid(0))


def _kill(group: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def _crash(code: int, log: Path) -> Result:
    """Return the result of a job that wrote none: its exit status in words, and the end of its log."""
    reason, error = "exit", f"the run ended its process with exit code {code}, as os._exit does"
    if code < 0:
        name = next((each.name for each in signal.Signals if each == -code), f"signal {-code}")
        cause = {"SIGKILL": ": out of memory?", "SIGTERM": ""}
        reason, error = "killed", f"killed by {name}{cause.get(name, ': a crash in native code')}"
    end = b""
    with suppress(OSError), log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _LAST_BYTES))
        end = file.read()
    lines = end.decode("utf-8", "replace").splitlines()[-_LAST_LINES:]
    return Result("crashed", reason, error, "\n".join(lines) or None)
