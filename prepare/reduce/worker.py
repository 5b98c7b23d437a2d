"""Run scripts in child processes: `python -m prepare.reduce.worker`, one JSON line for each.

As in `prepare.doctor.worker`, this process imports torch and computes nothing itself. On Linux scripts run in
a forked copy of it, which is replaced after each fault; elsewhere each runs in a new process.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import select
import signal
import subprocess
import sys
import warnings
from typing import Any

import torch

from prepare.core.utils.text import first_line, line
from prepare.reduce.records import CRASHES, FAULTS, HANGS, RAISES, SLOW, WRONG

_FORKS = sys.platform == "linux"
PASSES, INVALID = "passes", "invalid"
# A gradient whose largest number is below this, where that of the outputs is about 1, is all cancellation.
_LEAST = 1e-4
_EPS = {"float32": 6e-8, "float16": 5e-4, "bfloat16": 4e-3}


def run_script(script: str, *, dtype: str = "float32", allowed: float = 1e-4) -> tuple[str, str]:
    """Run a script in this process; return its outcome and what it said.

    `invalid`: it failed before its float64 run ended, or rounding alone might explain the error.
    """
    names: dict[str, Any] = {"__name__": "__main__"}
    printed = io.StringIO()
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(printed):
            warnings.simplefilter("ignore")
            exec(compile(script, "reduced.py", "exec"), names)  # noqa: S102  our own text
    except AssertionError as error:
        if "slow" in names:
            return SLOW, str(error)
        unsure = _is_ill_conditioned(names, _EPS[dtype], allowed)
        return (INVALID, "rounding may explain it") if unsure else (WRONG, str(error))
    except Exception as error:  # a kernel may raise anything
        text = f"{type(error).__name__}: {first_line(error)}"
        if isinstance(error, MemoryError) or "right" not in names:
            return INVALID, text
        return RAISES, text
    return PASSES, printed.getvalue().strip()


def _is_ill_conditioned(names: dict[str, Any], eps: float, allowed: float) -> bool:
    """Return whether rounding alone may explain an error.

    That is so if rounding the input changes the exact results by much of what is allowed, or if a gradient
    is almost zero because large numbers cancel.
    """
    run, module, right = names["run"], names["module"], names["right"]
    given = names["given"].double()
    signs = torch.randint(0, 2, given.shape, generator=torch.Generator().manual_seed(2)) * 2 - 1
    nudged = run(module, given * (1 + eps * signs), torch.contiguous_format)
    least = _LEAST / max(1.0, given.std(correction=0).item())
    for name, exact in right.items():
        size = exact.double().abs().max().item()
        change = (nudged[name].double() - exact.double()).abs().max().item()
        if not change <= 0.5 * allowed * max(size, 1e-30) or ("gradient" in name and size < least):
            return True
    return False


class ForkedRunner:
    """A forked copy of this process that runs scripts until one kills it, or needs too long."""

    def __init__(self) -> None:
        self._child = 0

    def run(self, request: dict[str, Any]) -> tuple[str, str]:
        """Run the script of a request; return its outcome and what it said."""
        if not self._child:
            self._start()
        os.write(self._requests, json.dumps(request).encode() + b"\n")
        ready, _, _ = select.select([self._answers], [], [], request["seconds"])
        text = self._answers.readline() if ready else ""
        if text:
            outcome, said = json.loads(text)
            if request["fresh"] or outcome in FAULTS:
                self.stop()  # its memory may be overwritten
            return outcome, said
        return (CRASHES, _death(self.stop())) if ready else (HANGS, self._hung())

    def stop(self) -> int:
        """End the child; return its exit code."""
        child, self._child = self._child, 0
        if not child:
            return 0
        os.close(self._requests)  # a child that waits for requests ends
        self._answers.close()
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    def _hung(self) -> str:
        os.kill(self._child, signal.SIGKILL)
        self.stop()
        return "it did not end in time"

    def _start(self) -> None:
        here, self._requests = os.pipe()
        answers, there = os.pipe()
        self._child = os.fork()
        if not self._child:
            os.close(self._requests)
            os.close(answers)
            with contextlib.suppress(BaseException), os.fdopen(there, "w") as file:
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, 1)
                os.dup2(null, 2)
                for text in os.fdopen(here):
                    file.write(json.dumps(_outcome(json.loads(text))) + "\n")
                    file.flush()
            os._exit(0)
        os.close(here)
        os.close(there)
        self._answers = os.fdopen(answers, errors="replace")


def _started(request: dict[str, Any]) -> tuple[str, str]:
    command = [sys.executable, "-m", "prepare.reduce.worker", json.dumps(request)]
    try:
        done = subprocess.run(  # noqa: S603
            command, capture_output=True, text=True, check=False, timeout=request["seconds"] + 60
        )
    except subprocess.TimeoutExpired:
        return HANGS, "it did not end in time"
    try:
        outcome, said = json.loads(done.stdout)
    except ValueError:
        return CRASHES, _death(done.returncode)
    return outcome, said


def _death(code: int) -> str:
    name = f"exit code {code}"
    if code < 0:
        with contextlib.suppress(ValueError):
            name = signal.Signals(-code).name
    return f"its process ended with {name}"


def _outcome(request: dict[str, Any]) -> tuple[str, str]:
    if setup := request.get("setup"):
        module, _, function = setup.partition(":")
        getattr(importlib.import_module(module), function)()
    return run_script(request["script"], dtype=request["dtype"], allowed=request["allowed"])


def main() -> None:
    """Answer the requests on stdin, or the one of the command line."""
    if len(sys.argv) > 1:
        line(json.dumps(_outcome(json.loads(sys.argv[1]))))
        return
    runner = ForkedRunner()
    for text in sys.stdin:
        request = json.loads(text)
        line(json.dumps(runner.run(request) if _FORKS else _started(request)))
        sys.stdout.flush()


if __name__ == "__main__":
    main()
