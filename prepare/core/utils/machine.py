"""Describe where a job runs: versions, processor, accelerator, other programs, how idle threads wait."""

from __future__ import annotations

import os
import platform
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

from prepare.core.utils.packages import version_of

_PACKAGES = ("torch-prepare", "hydra-core", "omegaconf", "numpy")
# Every key of the identity of an accelerator.
NAMES = ("backend", "cuda", "cudnn", "architectures", "hip")
_CPU, _STAT = Path("/proc/cpuinfo"), Path("/proc/stat")
# A machine is busy if other programs use this part of a core for each of our threads.
_BUSY = 0.2
# A busy machine is worth a word if the noise reaches this factor: more than most recipes win.
_LOUD = 1.05
# The columns of /proc/stat in which a processor works.
_WORKING = (0, 1, 2, 5, 6)
# The setting of GNU OpenMP, which the wheels of torch bring; Intel's and LLVM's threads sleep by themselves.
_SPIN_COUNT = "GOMP_SPINCOUNT"
_VARIABLES = ("OMP_WAIT_POLICY", _SPIN_COUNT)
# A compromise: a thread that spins longer takes time from one that works, where other processes are busy;
# one that sleeps at once must be woken for the next operator; docs/benchmarks.md has the figure.
_SPINS = "1000"


def environment() -> dict[str, Any]:
    """Return the environment as plain data; None for anything unknown."""
    import torch

    devices = ["mps"] if torch.backends.mps.is_available() else []
    if torch.cuda.is_available():
        devices = [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())]
    return {
        "format": "prepare.environment",
        "version": 1,
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "program": program(),
        "python": platform.python_version(),
        "packages": {name: version_of(name) for name in _PACKAGES},
        "platform": platform.platform(),
        "torch": torch.__version__,
        "cpu": _found_in(_CPU, r"^model name\s*: (.+)$") or platform.processor() or None,
        # A change of any of these may change the fastest kernel, or make it wrong.
        "accelerator": accelerator(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "waiting": how_threads_wait(),
        "devices": devices,
        "git_commit": _commit(Path.cwd()),
    }


def command_line(words: Iterable[str]) -> str:
    """Return a command as the user of this process types it: `python run.py WORDS`, or `prepare WORDS`."""
    return f"{program()} {shlex.join(words)}".rstrip()


def program() -> str:
    """Return the words with which the user starts this command line: `python run.py`, or `prepare`."""
    path = Path(sys.argv[0])
    if path.parts[-2:] == ("prepare", "__main__.py"):
        return "python -m prepare"
    return "prepare" if path.suffix != ".py" or path.name == "__main__.py" else "python run.py"


def accelerator() -> dict[str, Any]:
    """Return the identity of what torch computes with; None for anything that does not exist or is unknown.

    `backend` is cuda, rocm, mps, xpu or cpu; `architectures` are those of all visible devices (`sm_90`,
    `gfx942`).
    """
    import torch

    known: dict[str, Any] = {"backend": _backend(), "architectures": []}
    known |= {"cuda": torch.version.cuda, "hip": torch.version.hip}
    if known["backend"] in ("cuda", "rocm"):
        devices = [torch.cuda.get_device_properties(n) for n in range(torch.cuda.device_count())]
        is_rocm = known["backend"] == "rocm"
        names = {each.gcnArchName.partition(":")[0] for each in devices} if is_rocm else set()
        names |= set() if is_rocm else {f"sm_{each.major}{each.minor}" for each in devices}
        known["architectures"] = sorted(names)
        known["cudnn"] = None if is_rocm else _dotted_cudnn(torch.backends.cudnn.version())
    return {key: known.get(key) for key in NAMES}


def _found_in(path: Path, pattern: str) -> str | None:
    """Return what the group of a pattern matches in a file of the kernel, or None."""
    with suppress(OSError):
        if match := re.search(pattern, path.read_text(errors="replace"), re.MULTILINE):
            return match[1].strip()
    return None


def _backend() -> str:
    import torch

    if torch.cuda.is_available():
        return "rocm" if torch.version.hip else "cuda"
    if torch.backends.mps.is_available():
        return "mps"
    return "xpu" if torch.xpu.is_available() else "cpu"


def _dotted_cudnn(number: int | None) -> str | None:
    """Return torch's number of a cuDNN version, from 9 on, with dots: `9.10.2` for 91002."""
    return f"{number // 10000}.{number % 10000 // 100}.{number % 100}" if number else None


# Once a process: a verification names the environment, and takes 10 ms itself.
@cache
def _commit(folder: Path) -> str | None:
    command = ("git", "-C", str(folder), "rev-parse", "HEAD")
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)  # noqa: S603
        return done.stdout.strip()
    return None


class MachineWatch:
    """Measures from its creation on."""

    def __init__(self) -> None:
        self._clock, self._others = time.perf_counter(), _others()
        self._load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None

    def conditions(self) -> dict[str, Any]:
        """Return how the machine was since the start; None for anything unknown.

        `load_before` is the load average of the last minute, this process included; `others` are the
        cores that other programs used.
        """
        cores, before, now = len(usable_cores()), self._others, _others()
        passed, others = max(time.perf_counter() - self._clock, 1e-3), None
        if before is not None and now is not None:
            others = round(min(max(0.0, now - before) / passed, cores), 2)
        return {"cores_available": cores, "load_before": self._load, "others": others}


def disturbance(conditions: Mapping[str, Any]) -> str:
    """Return what disturbed timings under these conditions: `this machine is busy (...)`; empty if nothing.

    Conditions are those of `MachineWatch`, with the number of `threads`.
    """
    cores, load_before = conditions.get("cores_available"), conditions.get("load_before")
    others, threads = conditions.get("others"), conditions.get("threads") or 1
    if not cores:
        return ""
    if others is not None and others >= _BUSY * threads and cores - others < threads:
        return f"this machine is busy (other programs use {others:.1f} of {cores} cores)"
    if others is None and load_before is not None and load_before >= cores:
        return f"this machine is busy (load {load_before:.1f} on {cores} cores)"
    return ""


def disturbed_times(conditions: Mapping[str, Any], noise: float | None) -> str:
    """Return what disturbed times; empty if a model that was timed against itself hardly differed.

    `noise` is that difference as a factor, None if it is not known.
    """
    return disturbance(conditions) if noise is None or noise > _LOUD else ""


def busy_sentence(conditions: Mapping[str, Any], noise: float | None) -> str:
    """Return a sentence on what disturbed times, as in `disturbed_times`; empty if nothing did."""
    disturbed = disturbed_times(conditions, noise)
    return f"{disturbed}; repeat it later for a firm figure" if disturbed else ""


def usable_cores() -> set[int]:
    """Return the numbers of the cores that this process may use."""
    known = hasattr(os, "sched_getaffinity")
    return os.sched_getaffinity(0) if known else set(range(os.cpu_count() or 1))


def _others() -> float | None:
    """Return the seconds that the usable cores worked for other programs; None where that is not known."""
    own = os.times()
    with suppress(OSError, ValueError, IndexError):
        tick, usable = os.sysconf("SC_CLK_TCK"), {f"cpu{core}" for core in usable_cores()}
        lines = [line.split() for line in _STAT.read_text().splitlines()]
        rows = [
            [int(word) for word in words[1:]] for words in lines if words and words[0] in usable
        ]
        if any(map(sum, rows)):
            working = sum(row[column] for row in rows for column in _WORKING)
            return working / tick - own.user - own.system
    return None


def limit_spinning() -> None:
    """Limit how long threads spin, here and in child processes, unless the user has chosen it.

    Call it before torch is loaded: OpenMP reads the environment once.
    """
    if "torch" not in sys.modules and not any(name in os.environ for name in _VARIABLES):
        os.environ[_SPIN_COUNT] = _SPINS


def how_threads_waited(environment: Mapping[str, Any]) -> str:
    """Return the variables with which an environment made its times; empty where a single thread computed."""
    return str(environment.get("waiting") or "") if (environment.get("threads") or 1) > 1 else ""


def how_threads_wait() -> str:
    """Return the variables that decide how threads wait, as `NAME=value`; empty if none is set."""
    return " ".join(f"{name}={os.environ[name]}" for name in _VARIABLES if name in os.environ)
