"""Let OpenMP's threads sleep soon after they have nothing to do, instead of spinning."""

import os
import sys
import time
from contextlib import suppress
from pathlib import Path

# GNU OpenMP's, which the wheels of torch bring; Intel's and LLVM's sleep after a time by themselves.
_SPIN_COUNT = "GOMP_SPINCOUNT"
_VARIABLES = ("OMP_WAIT_POLICY", _SPIN_COUNT)
# A compromise: a thread that spins longer takes time from one that works, where other processes are busy;
# one that sleeps at once must be woken for the next operator: `benchmarks/waiting.py`.
_SPINS = "1000"
_LOADAVG, _MAPS = Path("/proc/loadavg"), Path("/proc/self/maps")
_SAMPLES, _INTERVAL = 3, 0.002


def limit_spinning() -> None:
    """Limit how long threads spin, here and in child processes, unless the user has chosen it.

    Call it before torch is loaded: OpenMP reads the environment once.
    """
    if "torch" not in sys.modules and not any(name in os.environ for name in _VARIABLES):
        os.environ[_SPIN_COUNT] = _SPINS


def waiting() -> str:
    """Return the variables that decide how threads wait, as `NAME=value`; empty if none is set."""
    return " ".join(f"{name}={os.environ[name]}" for name in _VARIABLES if name in os.environ)


def spinning_among(cores: int) -> int:
    """Return how many threads of the machine want to run; 0 if `cores` suffice or this process never spins.

    A process spins if it has loaded GNU OpenMP and no variable limits it.
    """
    if waiting():
        return 0
    fewest = sys.maxsize
    with suppress(OSError, ValueError, IndexError):
        for sample in range(_SAMPLES):
            if sample:
                time.sleep(_INTERVAL)
            fewest = min(fewest, int(_LOADAVG.read_text().split()[3].partition("/")[0]))
            if fewest <= cores:
                return 0
        return fewest if "libgomp" in _MAPS.read_text(errors="replace") else 0
    return 0
