"""Use no more threads than there are free cores: threads that wait for a busy core make torch slower."""

from __future__ import annotations

import os
import time
from contextlib import AbstractContextManager
from pathlib import Path

import torch

from prepare.core.model.threads import with_threads

_LOADAVG = Path("/proc/loadavg")
_SAMPLES, _INTERVAL = 5, 0.004


def threads_for_free_cores() -> AbstractContextManager[None]:
    """Limit torch's threads inside the block to the cores on which nothing else runs, at least one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return with_threads(min(torch.get_num_threads(), max(1, (cores or 1) - other_runnable())))


def other_runnable() -> int:
    """Return how many other threads of this machine run or wait for a core; 0 if the system does not say."""
    counts = []
    try:
        for _ in range(_SAMPLES):
            counts.append(int(_LOADAVG.read_text().split()[3].partition("/")[0]) - 1)
            time.sleep(_INTERVAL)
    except (OSError, ValueError, IndexError):
        return 0
    return max(min(counts), 0)
