"""The process that forks the jobs of a sweep: it imports torch once, and each fork executes one job."""

from __future__ import annotations

import faulthandler
import importlib
import os
import pickle
import select
import signal
import sys
import threading
import traceback
import warnings
from contextlib import nullcontext, suppress
from multiprocessing.connection import Connection, wait
from typing import IO, Any, NoReturn

from prepare.app.job.execute import JobSpec, run_job
from prepare.app.sweep.locks import ClaimLost
from prepare.core.utils.files import checked_writes
from prepare.stages.registry import ordered_stages

# Modules that are slow to import and that every job needs: that of the job, and what it imports later.
_PRELOADED = (
    "torch",
    "torch.utils._device",
    "prepare.audit",
    "prepare.audit.read_model",
    "prepare.core.forward.input_formatter",
    "prepare.core.forward.run_example",
    "prepare.core.forward.torch_state",
    "prepare.core.utils.machine",
    "prepare.app.job.run_stages",
)
# Bytes of a job's output that are kept from its beginning, and as many from its end.
_HALF = 1 << 19


def serve(handle: int, preload: list[str]) -> None:
    """Execute the jobs that arrive through the socket `handle`, until its other end is closed.

    A request is a pair: the path of a log, and a pickled `JobSpec`. The answers are the id of the process
    that executes it, and its exit status. If the requesting process ends, its end of the socket closes,
    and the running job is killed with all processes that it started.
    """
    imported, all_imported = os.pipe()
    watch = threading.Thread(target=_end_if_left, args=(handle, imported), daemon=True)
    watch.start()
    of_stages = (name for cls in ordered_stages() if cls.default for name in cls.imports)
    for name in (*_PRELOADED, *of_stages, *preload):
        module = importlib.import_module(name)
        # Some modules load more than their imports.
        getattr(module, "get_ready", lambda: None)()
    os.close(all_imported)
    watch.join()  # a process that forks should have no threads
    os.close(imported)
    # Until here a signal may end this process; from now on it must kill its job first.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    client, child_ended = Connection(handle), _child_end_pipe()
    with suppress(EOFError, OSError):
        while True:
            log, pickled = client.recv()
            output, job_output = os.pipe()
            # Nothing is written to it: the job sees it close when this process dies.
            parent_dead, parent_alive = os.pipe()
            if not (pid := _fork()):
                client.close()
                os.close(parent_alive)
                _execute(pickled, job_output, parent_dead)
            os.close(job_output)
            os.close(parent_dead)
            try:
                client.send(pid)
            finally:
                status = _wait_for_job(pid, client, child_ended, output, _Log(log))
                os.close(parent_alive)
            client.send(status)


def _end_if_left(client: int, imported: int) -> None:
    """End this process with the requesting one, until `imported` closes: imports may take long."""
    ends = select.poll()
    for handle in (client, imported):
        ends.register(handle, 0)  # a handle that its other end has closed is always reported
    if client in dict(ends.poll()):
        os._exit(1)


def _child_end_pipe() -> int:
    """Return a handle that becomes readable when a child has ended."""
    readable, written = os.pipe()
    for handle in (readable, written):
        os.set_blocking(handle, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(written, warn_on_full_buffer=False)
    return readable


def _fork() -> int:
    with warnings.catch_warnings():
        # NumPy starts threads when it is imported, and they are safe to fork; Python 3.12 warns of them.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _execute(pickled: bytes, output: int, parent_dead: int) -> NoReturn:
    code = 1
    try:
        os.setpgid(0, 0)
        threading.Thread(target=_end_with_parent, args=(parent_dead,), daemon=True).start()
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        for handle, name in enumerate(("stdout", "stderr"), start=1):
            os.dup2(output, handle)
            # New streams: an existing one cannot be changed from a file to a pipe.
            stream = open(handle, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)
        faulthandler.enable(2)
        spec: JobSpec = pickle.loads(pickled)  # noqa: S301  sent by the process that started this one
        spec.enter()
        with checked_writes(spec.check_writes) if spec.check_writes else nullcontext():
            run_job(spec, begun=True)
        code = 0
    except ClaimLost:  # another process runs the job
        pass
    except BaseException:
        traceback.print_exc()
    finally:
        for standard in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                standard.flush()
        # Skip the interpreter's shutdown: the record is complete, and a library may hang or crash there.
        os._exit(code)


def _end_with_parent(parent_dead: int) -> None:
    """Kill this job, and the processes that it started, when the forking process dies."""
    os.read(parent_dead, 1)
    _kill(os.getpgid(0))


def _wait_for_job(pid: int, client: Connection, child_ended: int, output: int, log: _Log) -> int:
    """Write what the job prints to its log until it ends; return its exit status.

    Raises:
        EOFError: the requesting process has ended, and the job was killed.
    """
    with suppress(OSError):  # the job may have done so already
        os.setpgid(pid, pid)
    sources: list[Any] = [client, child_ended, output]
    os.set_blocking(output, False)
    try:
        while True:
            ready = wait(sources)
            if child_ended in ready:
                with suppress(BlockingIOError):
                    os.read(child_ended, 4096)
            if output in ready and not log.copy(output):
                sources.remove(output)
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                return status
            if client in ready:
                raise EOFError
    except BaseException:
        _kill(pid)
        os.waitpid(pid, 0)
        raise
    finally:
        _kill(pid)  # the processes that the job started and did not end
        log.copy(output)
        log.close()
        os.close(output)


def _kill(group: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


class _Log:
    """The log file of a job: the beginning of its output as it arrives, and the end when the job ends."""

    def __init__(self, path: str) -> None:
        self._path, self._written = path, 0
        self._file: IO[bytes] | None = None
        self._tail, self._tail_total = bytearray(), 0

    def copy(self, output: int) -> bool:
        """Copy the output that can be read now; return True if more may follow."""
        with suppress(BlockingIOError):
            while data := os.read(output, 1 << 16):
                first = data[: _HALF - self._written]
                self._append(first)
                self._written += len(first)
                self._tail_total += len(data) - len(first)
                self._tail += data[len(first) :]
                del self._tail[:-_HALF]
            return False
        return True

    def close(self) -> None:
        """Write the end of the output."""
        if left_out := self._tail_total - len(self._tail):
            self._append(f"\n... {left_out:,} bytes left out ...\n".encode())
        self._append(bytes(self._tail))
        if self._file is not None:
            self._file.close()

    def _append(self, data: bytes) -> None:
        # If the disk is full, the job's own files will report it.
        with suppress(OSError):
            if data and self._file is None:
                # Once: who has lost its claim shall not write to the log of another process's job.
                self._file = open(self._path, "ab", buffering=0)  # noqa: PTH123, SIM115  # noqa: SIM115
            if data and self._file is not None:
                self._file.write(data)
