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
_CPU, _STAT = Path("/proc/cpuinfo"), Path("/proc/stat")
# A machine is busy if other programs use this part of a core for each of our threads.
_BUSY = 0.2
# A busy machine is worth a word if the noise reaches this factor: more than most recipes win.
_LOUD = 1.05
# The columns of /proc/stat in which a processor works.
_WORKING = (1, 2, 3, 6, 7)
# The setting of GNU OpenMP, which the wheels of torch bring; Intel's and LLVM's threads sleep by themselves.
_SPIN_COUNT = "GOMP_SPINCOUNT"
_VARIABLES = ("OMP_WAIT_POLICY", _SPIN_COUNT)
# A compromise: a thread that spins longer takes time from one that works, where other processes are busy;
# one that sleeps at once must be woken for the next operator; docs/benchmarks.md has the figure.
_SPINS = "1000"


def environment() -> dict[str, Any]:
    """Return the environment as plain data; None for anything unknown."""
    import torch

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
        "cpu": _processor() or platform.processor() or None,
        # A change of any of these may change the fastest kernel, or make it wrong.
        "accelerator": accelerator(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "waiting": how_threads_wait(),
        "devices": devices or ["mps"] * torch.backends.mps.is_available(),
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

    known: dict[str, Any] = {"backend": _backend(), "cuda": torch.version.cuda, "cudnn": None}
    known |= {"architectures": [], "hip": torch.version.hip}
    if known["backend"] in ("cuda", "rocm"):
        devices = [torch.cuda.get_device_properties(n) for n in range(torch.cuda.device_count())]
        if known["backend"] == "rocm":
            names = {each.gcnArchName.partition(":")[0] for each in devices}
        else:
            names = {f"sm_{each.major}{each.minor}" for each in devices}
            if number := torch.backends.cudnn.version():  # from 9 on 91002 is 9.10.2
                known["cudnn"] = f"{number // 10000}.{number % 10000 // 100}.{number % 100}"
        known["architectures"] = sorted(names)
    return known


def _processor() -> str:
    with suppress(OSError):
        return next(
            iter(re.findall(r"\nmodel name\s*: (.+)", _CPU.read_text(errors="replace"))), ""
        )
    return ""


def _backend() -> str:
    import torch

    if torch.cuda.is_available():
        return "rocm" if torch.version.hip else "cuda"
    if torch.backends.mps.is_available():
        return "mps"
    return "xpu" if torch.xpu.is_available() else "cpu"


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

    def conditions(self) -> dict[str, Any]:
        """Return how the machine was since the start; None for anything unknown.

        `others` are the cores that other programs used.
        """
        cores, before, now = len(usable_cores()), self._others, _others()
        passed, others = max(time.perf_counter() - self._clock, 1e-3), None
        if before is not None and now is not None:
            others = round(min(max(0.0, now - before) / passed, cores), 2)
        return {"cores_available": cores, "others": others}


def disturbance(conditions: Mapping[str, Any]) -> str:
    """Return what disturbed timings under these conditions: `this machine is busy (...)`; empty if nothing.

    Conditions are those of `MachineWatch`, with the number of `threads`.
    """
    cores, others = conditions.get("cores_available"), conditions.get("others")
    threads = conditions.get("threads") or 1
    if cores and others and others >= _BUSY * threads and cores - others < threads:
        return f"this machine is busy (other programs use {others:.1f} of {cores} cores)"
    return ""


def busy_sentence(conditions: Mapping[str, Any], noise: float | None) -> str:
    """Return a sentence on what disturbed times; empty if a model timed against itself hardly differed.

    `noise` is that difference as a factor, None if it is not known.
    """
    disturbed = disturbance(conditions) if noise is None or noise > _LOUD else ""
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
        rows = [line.split() for line in _STAT.read_text().splitlines() if line.startswith("cpu")]
        worked = sum(int(row[n]) for row in rows if row[0] in usable for n in _WORKING)
        return worked / tick - own.user - own.system if worked else None
    return None


def limit_spinning() -> None:
    """Limit how long threads spin, here and in child processes, unless the user has chosen it.

    Call it before torch is loaded: OpenMP reads the environment once.
    """
    if "torch" not in sys.modules and not any(name in os.environ for name in _VARIABLES):
        os.environ[_SPIN_COUNT] = _SPINS


def how_threads_wait() -> str:
    """Return the variables that decide how threads wait, as `NAME=value`; empty if none is set."""
    return " ".join(f"{name}={os.environ[name]}" for name in _VARIABLES if name in os.environ)
