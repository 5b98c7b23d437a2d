"""Run probes in child processes with limits of time and memory: `python -m prepare.doctor.worker REQUEST`.

It imports torch once and computes nothing itself. On Linux each probe runs in a forked copy of it, elsewhere
in a new process. It prints one JSON line for each probe.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from prepare.core.utils.text import first_line, line, size
from prepare.doctor.cases import CaseOutcome
from prepare.doctor.probes import PROBES

_FORKS = sys.platform == "linux"


@dataclass(frozen=True)
class Request:
    """The question to a worker: the probes, where they run, and the limits of each.

    `setup` names a function, `module:function`, that a child calls first; for tests.
    """

    probes: tuple[str, ...]
    device: str
    memory: int
    setup: str = ""


def run_probe(name: str, device: str) -> CaseOutcome:
    """Run one probe in this process; return the worst outcome of its cases."""
    outcomes = []
    for outcome in PROBES[name].run(device):
        outcomes.append(outcome)
        if outcome.bad == "wrong here":
            return outcome
    order = ("", "unclear", "slow here")
    return max(outcomes, key=lambda each: (order.index(each.bad), each.error or 0.0))


def limited(name: str, request: Request) -> CaseOutcome:
    """Run one probe under the limits. The system kills this process when the time is over."""
    if request.setup:
        module, _, function = request.setup.partition(":")
        getattr(importlib.import_module(module), function)()
    if hasattr(signal, "setitimer"):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, PROBES[name].seconds)
    _limit_memory(request)
    warnings.simplefilter("ignore")
    try:
        return run_probe(name, request.device)
    except MemoryError:
        return _out_of_memory(request)
    except RuntimeError as error:
        # torch raises RuntimeError from its allocators, on a CPU and on a GPU.
        if "memory" in str(error).lower():
            return _out_of_memory(request)
        return CaseOutcome("wrong here", f"it raises {type(error).__name__}: {first_line(error)}")
    except Exception as error:  # a finding too; the other probes continue
        return CaseOutcome("wrong here", f"it raises {type(error).__name__}: {first_line(error)}")


def in_child(name: str, request: Request) -> dict[str, Any]:
    """Run one probe in a process of its own, and return its outcome as plain data, with its seconds."""
    began = time.perf_counter()
    text, code = _forked(name, request) if _FORKS else _started(name, request)
    try:
        outcome = json.loads(text)
    except ValueError:
        outcome = asdict(_death(code))
    return outcome | {"probe": name, "seconds": round(time.perf_counter() - began, 3)}


def _forked(name: str, request: Request) -> tuple[str, int]:
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(reader)
        with contextlib.suppress(BaseException), os.fdopen(writer, "w") as file:
            _silence()
            file.write(json.dumps(asdict(limited(name, request))))
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, errors="replace") as file:
        text = file.read()
    return text, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _started(name: str, request: Request) -> tuple[str, int]:
    alone = json.dumps({**asdict(request), "probes": [name], "alone": True})
    command = [sys.executable, "-m", "prepare.doctor.worker", alone]
    try:
        done = subprocess.run(  # noqa: S603
            command, capture_output=True, text=True, check=False, timeout=PROBES[name].seconds + 60
        )
    except subprocess.TimeoutExpired:
        return "", -int(getattr(signal, "SIGALRM", 14))
    return done.stdout, done.returncode


def _silence() -> None:
    """Send the output of kernels, as glibc's "double free", to nowhere."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)


def _death(code: int) -> CaseOutcome:
    if -code == getattr(signal, "SIGALRM", 14):
        return CaseOutcome("wrong here", "it did not end in time, and was killed")
    if code < 0:
        with contextlib.suppress(ValueError):
            return CaseOutcome(
                "wrong here", f"its process was killed by {signal.Signals(-code).name}"
            )
    return CaseOutcome("wrong here", f"its process ended without an answer, with exit code {code}")


def _out_of_memory(request: Request) -> CaseOutcome:
    return CaseOutcome("wrong here", f"it needs more memory than {size(request.memory)}")


def _limit_memory(request: Request) -> None:
    """Limit what this process may allocate from now on; on a GPU, the share of its memory."""
    if request.device != "cpu":
        import torch

        if request.device.startswith("cuda"):
            total = torch.cuda.get_device_properties(request.device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, request.memory / total))
        return
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        used = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
        limit = used + request.memory
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def main() -> None:
    """Answer the request of the command line."""
    given = json.loads(sys.argv[1])
    alone = given.pop("alone", False)
    request = Request(**{**given, "probes": tuple(given["probes"])})
    if alone:
        line(json.dumps(asdict(limited(request.probes[0], request))))
        return
    for name in request.probes:
        line(json.dumps(in_child(name, request)))


if __name__ == "__main__":
    main()
