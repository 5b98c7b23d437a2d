"""Measure what disturbs timings, and limit how long OpenMP's idle threads spin."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

_STAT = Path("/proc/stat")
_LIMITS = (Path("/sys/fs/cgroup/cpu.stat"), Path("/sys/fs/cgroup/cpu/cpu.stat"))
# A disturbance is reported if its fraction reaches these: cores of other programs for each of our threads,
# processor time that the host took, time in which a limit stopped all threads.
_BUSY, _STOLEN, _HELD = 0.2, 0.02, 0.01
# A busy machine is worth a word if the noise reaches this factor: more than most recipes win.
_LOUD = 1.05
# The columns of /proc/stat in which a processor works, and the one in which the host works instead.
_WORKING, _STEAL = (0, 1, 2, 5, 6), 7
# The setting of GNU OpenMP, which the wheels of torch bring; Intel's and LLVM's threads sleep by themselves.
_SPIN_COUNT = "GOMP_SPINCOUNT"
_VARIABLES = ("OMP_WAIT_POLICY", _SPIN_COUNT)
# A compromise: a thread that spins longer takes time from one that works, where other processes are busy;
# one that sleeps at once must be woken for the next operator; docs/benchmarks.md has the figure.
_SPINS = "1000"


class _Clocks(NamedTuple):
    """Seconds since some fixed moment; `working` and `stolen` are None where they are not known."""

    passed: float
    own: float
    working: float | None
    stolen: float | None
    held: float | None


class MachineWatch:
    """Measures from its creation on."""

    def __init__(self) -> None:
        self._cores = usable_cores()
        self._start, self._load = _clocks(len(self._cores)), load()

    def conditions(self) -> dict[str, Any]:
        """Return how the machine was since the start; None for anything unknown.

        `load_before` is the load average of the last minute, this process included. `others` are the
        cores that other programs used, `stolen` the fraction of the processor time that the host of a
        virtual machine took, `held_back` the fraction of the time in which a limit stopped this process.
        """
        start, end, cores = self._start, _clocks(len(self._cores)), len(self._cores)
        passed = max(end.passed - start.passed, 1e-3)
        others = _difference(end.working, start.working)
        if others is not None:
            others = max(0.0, others - (end.own - start.own)) / passed
        stolen, held = _difference(end.stolen, start.stolen), _difference(end.held, start.held)
        return {
            "cores_available": cores,
            "load_before": self._load,
            "others": None if others is None else round(min(others, cores), 2),
            "stolen": None if stolen is None else round(stolen / passed / cores, 3),
            "held_back": None if held is None else round(held / passed, 3),
        }


def disturbance(conditions: Mapping[str, Any]) -> str:
    """Return what disturbed timings under these conditions: `this machine is busy (...)`; empty if nothing.

    Conditions are those of `MachineWatch`, with the number of `threads`. Older records have less.
    """
    cores, load_before = conditions.get("cores_available"), conditions.get("load_before")
    others, threads = conditions.get("others"), conditions.get("threads") or 1
    stolen, held = conditions.get("stolen") or 0.0, conditions.get("held_back") or 0.0
    if not cores:
        return ""
    if others is not None and others >= _BUSY * threads and cores - others < threads:
        return f"this machine is busy (other programs use {others:.1f} of {cores} cores)"
    if others is None and load_before is not None and load_before >= cores:
        return f"this machine is busy (load {load_before:.1f} on {cores} cores)"
    if stolen >= _STOLEN:
        return (
            f"the host of this virtual machine is busy (it took {stolen:.0%} of the processor time)"
        )
    if held >= _HELD:
        return f"a processor limit held this process back ({held:.0%} of the time)"
    return ""


# A number that is found, or not, in a time that grows with the text, whatever is in it.
_NUMBER = r"([0-9]{1,9}(?:\.[0-9]{1,9})?)"


def disturbed_part(text: str) -> float:
    """Return the part of the machine that a text of `disturbance` names: 0.8 of `1.6 of 2 cores`."""
    if cores := re.search(rf"{_NUMBER} (?:of|on) ([1-9]\d{{0,8}}) cores", text):
        return float(cores[1]) / float(cores[2])
    percent = re.search(rf"{_NUMBER} ?%", text)
    return float(percent[1]) / 100 if percent else 0.0


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


def load() -> float | None:
    """Return the load average of the last minute; None on Windows."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def _clocks(cores: int) -> _Clocks:
    own = os.times()
    working, stolen = _processors()
    held = _held_back()
    return _Clocks(
        time.perf_counter(), own.user + own.system, working, stolen, held and held / max(cores, 1)
    )


def _processors() -> tuple[float | None, float | None]:
    """Return the seconds that the usable cores worked, and those that the host took from them."""
    with suppress(OSError, ValueError, IndexError):
        tick, usable = os.sysconf("SC_CLK_TCK"), usable_cores()
        lines = (line.split() for line in _STAT.read_text().splitlines())
        named = {words[0]: [int(word) for word in words[1:]] for words in lines if words}
        rows = [named[f"cpu{core}"] for core in usable if f"cpu{core}" in named]
        if any(map(sum, rows)):
            working = sum(row[column] for row in rows for column in _WORKING)
            return working / tick, sum(row[_STEAL] for row in rows) / tick
    return None, None


def _held_back() -> float | None:
    """Return the seconds that a limit of the control group stopped its processes."""
    for path in _LIMITS:
        with suppress(OSError):
            if match := re.search(r"^throttled_(usec|time) (\d+)$", path.read_text(), re.MULTILINE):
                return int(match[2]) / (1e6 if match[1] == "usec" else 1e9)
    return None


def _difference(end: float | None, start: float | None) -> float | None:
    return None if end is None or start is None else max(0.0, end - start)


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
