"""Run a function in a child process, so that a crash, a hang or too much memory ends only that process.

`Worker` starts `python -m prepare.core.utils.child_process MODULE:FUNCTION`, which imports the function and
computes nothing itself: on Linux each request runs in a forked copy of it, elsewhere in a new process.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
from functools import partial
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

# The number of SIGALRM on Linux and macOS; Windows has none.
_ALARM = 14
HANGS = "did not end in time, and was killed"


class Worker:
    """While entered, answers requests, which are JSON data as answers are; `environment` adds variables."""

    def __init__(self, function: str, environment: Mapping[str, str] | None = None) -> None:
        self._function = function
        # The child finds what this process has found, also where it was put on the path in here.
        paths = os.pathsep.join(filter(None, sys.path))
        self._environment = {**os.environ, "PYTHONPATH": paths, **(environment or {})}

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(  # noqa: S603
            _command(self._function),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=self._environment,
        )
        return self

    def __exit__(self, *raised: object) -> None:
        self._process.kill()
        self._process.communicate()

    def ask(self, request: Any, *, seconds: float, fresh: bool = True) -> tuple[Any, str]:
        """Return the answer to a request; or None, and how the child died that should have answered.

        Unless it has to be `fresh`, the child may be the one that answered before.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([request, seconds, fresh]) + "\n")
        self._process.stdin.flush()
        answer, death = json.loads(self._process.stdout.readline())
        return answer, death


class ForkedRunner:
    """A forked copy of this process that calls a function for each request, until one of them ends it."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self._function, self._child = function, 0

    def ask(self, request: Any, *, seconds: float, fresh: bool = True) -> tuple[Any, str]:
        """Answer as `Worker.ask` does."""
        if fresh:
            self.stop()
        if not self._child:
            self._start()
        os.write(self._requests, json.dumps([request, seconds]).encode() + b"\n")
        text = self._answers.readline()
        return (json.loads(text), "") if text.endswith("\n") else (None, how_ended(self.stop()))

    def stop(self) -> int:
        """End the child; return its exit code."""
        child, self._child = self._child, 0
        if not child:
            return 0
        os.close(self._requests)  # a child that waits for requests ends
        self._answers.close()
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    def _start(self) -> None:
        here, self._requests = os.pipe()
        answers, there = os.pipe()
        self._child = os.fork()
        if not self._child:
            os.close(self._requests)
            os.close(answers)
            with contextlib.suppress(BaseException), os.fdopen(there, "w") as file:
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, 1)  # what kernels print, as glibc's "double free"
                os.dup2(null, 2)
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                for text in os.fdopen(here):
                    request, seconds = json.loads(text)
                    # The system ends this process when the time is over, also in native code.
                    signal.setitimer(signal.ITIMER_REAL, seconds)
                    answer = json.dumps(self._function(request))
                    signal.setitimer(signal.ITIMER_REAL, 0)
                    file.write(answer + "\n")
                    file.flush()
            os._exit(0)
        os.close(here)
        os.close(there)
        self._answers = os.fdopen(answers, errors="replace")


def how_ended(code: int) -> str:
    """Describe the end of a process that left no answer: `was killed by SIGSEGV`."""
    if code == -_ALARM:
        return HANGS
    return f"was killed by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"


def signal_name(number: int) -> str:
    """Return `SIGSEGV` for 11."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _command(function: str, *words: str) -> list[str]:
    return [sys.executable, "-m", "prepare.core.utils.child_process", function, *words]


def _in_new_process(
    function: str,
    request: Any,
    *,
    seconds: float,
    fresh: bool,  # noqa: ARG001  it always is
) -> tuple[Any, str]:
    """Answer as `Worker.ask` does, in a new process, which needs time to import torch."""
    command = _command(function, json.dumps(request))
    try:
        done = subprocess.run(  # noqa: S603
            command, capture_output=True, text=True, check=False, timeout=seconds + 60
        )
    except subprocess.TimeoutExpired:
        return None, HANGS
    return (None, how_ended(done.returncode)) if done.returncode else (json.loads(done.stdout), "")


def _main(name: str, *request: str) -> None:
    """Answer the requests on stdin, or the one of the command line."""
    module, _, attribute = name.partition(":")
    function = getattr(importlib.import_module(module), attribute)
    if request:
        sys.stdout.write(json.dumps(function(json.loads(request[0]))))
        return
    ask = ForkedRunner(function).ask if sys.platform == "linux" else partial(_in_new_process, name)
    for text in sys.stdin:
        asked, seconds, fresh = json.loads(text)
        sys.stdout.write(json.dumps(ask(asked, seconds=seconds, fresh=fresh)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    _main(*sys.argv[1:])
