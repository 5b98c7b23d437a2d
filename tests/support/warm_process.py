"""Start the command line, and the server of a sweep's jobs, in copies of a process that has loaded torch.

The full counts (`pytest -m slow`) start processes of their own, as a user does.
"""

import atexit
import io
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.reduction import DupFd
from pathlib import Path

from hydra_cache import use_hydra_cache
from paths import RUN
from prepare.app.cli.main import main
from prepare.app.sweep import fork_server, worker

COLD = "PREPARE_TESTS_COLD"
COLD_SERVER = worker._start_server
_CONTEXT = multiprocessing.get_context("forkserver") if os.name == "posix" else None
_PRELOADED = [
    *fork_server._PRELOADED,
    "prepare.app.cli.hydra_app",
    "prepare.app.report.pages.write_pages",
]


def start(
    *words: str | Path, cwd: Path, env: dict[str, str], text: bool = True, cold: bool = False
) -> "subprocess.Popen | WarmProcess":
    """Start `python run.py WORDS` with that environment; Ctrl-C stops it, and its output is captured.

    A `cold` one is a new interpreter: for what an environment changes when Python or torch is loaded.
    """
    if not (cold or os.environ.get(COLD)):
        return WarmProcess([str(word) for word in words], cwd, env, text=text)
    # A shell makes its background processes, and all that they start, ignore Ctrl-C.
    posix = os.name == "posix"
    restore = (lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)) if posix else None
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, str(RUN), *words], cwd=cwd, env=env, preexec_fn=restore,
        stdout=pipe, stderr=pipe, text=text,
    )  # fmt: skip


def context() -> multiprocessing.context.BaseContext:
    """Return what starts processes that have loaded torch already, where there is a fork."""
    if _CONTEXT is None:
        return multiprocessing.get_context("spawn")
    _CONTEXT.set_forkserver_preload(_PRELOADED)
    return _CONTEXT


class WarmServer:
    """The started server of a sweep's jobs, with the part of `subprocess.Popen` that a sweep uses."""

    def __init__(self, handle: int, preload: tuple[str, ...]) -> None:
        where = (list(sys.path), str(Path.cwd()), dict(os.environ))
        self._start(_serve, (_Handles([handle]), preload, *where))

    def _start(self, target: Callable, arguments: tuple) -> None:
        self._process = context().Process(target=target, args=arguments)
        self._process.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("run.py", timeout)
        return self.returncode

    def send_signal(self, number: int) -> None:
        # It may have ended, and its server have seen that, before this process knows.
        if self.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


class WarmProcess(WarmServer):
    """A started command, with the part of `subprocess.Popen` that tests use."""

    def __init__(self, words: list[str], cwd: Path, env: dict[str, str], *, text: bool) -> None:
        pipes = [os.pipe(), os.pipe()]
        written = [handle for _, handle in pipes]
        # DupFd can be made only while a process is started.
        self._start(_run, (words, str(cwd), dict(env), _Handles(written)))
        for handle in written:
            os.close(handle)
        mode = "r" if text else "rb"
        self.stdout, self.stderr = (os.fdopen(handle, mode) for handle, _ in pipes)

    def communicate(self, timeout: float | None = None) -> tuple:
        """Return all that it writes until it has ended."""
        with ThreadPoolExecutor(2) as pool:
            found = [pool.submit(stream.read) for stream in (self.stdout, self.stderr)]
            end = time.monotonic() + (timeout or 600)
            try:
                output = tuple(each.result(max(0, end - time.monotonic())) for each in found)
            except TimeoutError:
                self.kill()
                raise
        self.wait(timeout)
        for stream in (self.stdout, self.stderr):
            stream.close()
        return output


class _Handles:
    """File handles that are passed to a process when it is started."""

    def __init__(self, handles: list[int]) -> None:
        self._handles = handles

    def __getstate__(self) -> list:
        return [DupFd(handle) for handle in self._handles]

    def __setstate__(self, state: list) -> None:
        self._handles = [each.detach() for each in state]

    def __iter__(self):
        return iter(self._handles)


def _run(words: list[str], cwd: str, env: dict[str, str], outputs: _Handles) -> None:
    """Be `python run.py WORDS`, and end this process as it does."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, handle in enumerate(outputs, start=1):
        os.dup2(handle, number)
        os.close(handle)
    sys.stdout, sys.stderr = _stream(1), _stream(2)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    own = [str(RUN.parent), *filter(None, env.get("PYTHONPATH", "").split(os.pathsep))]
    sys.path[:] = [*own, *(path for path in sys.path if path not in own)]
    sys.argv[:] = [str(RUN), *words]
    worker._start_server = _fork_server
    use_hydra_cache()
    if machine := env.get("PREPARE_TESTS_MACHINE"):
        import machines

        machines.enter(machine)
    code = 1
    try:
        main()
        code = 0
    except SystemExit as stop:
        code = stop.code or 0
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _serve(
    handles: _Handles, preload: tuple[str, ...], path: list[str], cwd: str, env: dict[str, str]
) -> None:
    """Be the server of a sweep's jobs, as a new interpreter is."""
    (handle,) = handles
    sys.path[:] = path
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    _serve_and_end(handle, preload)


def _serve_and_end(handle: int, preload: tuple[str, ...]) -> None:
    try:
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        fork_server.serve(handle, list(preload))
    finally:
        os._exit(0)


def _stream(number: int) -> io.TextIOWrapper:
    raw = open(number, "wb", closefd=False)  # noqa: SIM115
    return io.TextIOWrapper(raw, "utf-8", "backslashreplace", line_buffering=number == 2)


class _Forked:
    """A forked copy of this process, with the part of `subprocess.Popen` that a sweep uses."""

    def __init__(self, pid: int) -> None:
        self.pid, self.returncode = pid, None

    def terminate(self) -> None:
        os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        end = time.monotonic() + (timeout or 600)
        while self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                self.returncode = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > end:
                raise subprocess.TimeoutExpired("fork server", timeout)
            else:
                time.sleep(0.01)
        return self.returncode


def _fork_server(handle: int, preload: tuple[str, ...]) -> _Forked:
    """Start the server of a sweep's jobs as a copy of this process, without its open files and handlers."""
    if not (pid := os.fork()):
        os.closerange(3, handle)
        os.closerange(handle + 1, 1 << 12)
        _serve_and_end(handle, preload)
    return _Forked(pid)
