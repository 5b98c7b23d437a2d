"""Ask devices for their free memory, wait for them, and compute in fewer threads."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

_MEMINFO = Path("/proc/meminfo")


def free_memory(device: torch.device) -> int | None:
    """Return the bytes of free memory, or None where the system does not report it."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    with contextlib.suppress(OSError, StopIteration, ValueError):
        lines = _MEMINFO.read_text().splitlines()
        available = next(line for line in lines if line.startswith("MemAvailable"))
        return 1024 * int(available.split()[1])
    return None


def wait_for(devices: Iterable[torch.device]) -> None:
    """Wait for all work on every accelerator among `devices`; a CPU has none that is waiting."""
    for device in {device for device in devices if device.type not in ("cpu", "meta")}:
        synchronize = getattr(torch, device.type).synchronize
        # There is one MPS, and its function takes no argument.
        synchronize() if device.type == "mps" else synchronize(device)


@contextmanager
def with_threads(count: int) -> Iterator[None]:
    """Run torch's operators in `count` threads; for the calling thread alone, if the system allows that."""
    before = torch.get_num_threads()
    if count == before:
        yield
        return
    set_threads = _set_threads()
    set_threads(count)
    try:
        yield
    finally:
        set_threads(before)


@cache
def _set_threads() -> Callable[[int], object]:
    """Return a function that sets the number of threads of the calling thread.

    `torch.set_num_threads` also sets it for threads that start later, so OpenMP's own function is better
    where it can be found.
    """
    count = torch.get_num_threads()
    try:
        omp_set_num_threads = ctypes.CDLL(None).omp_set_num_threads
    except (OSError, AttributeError, TypeError):  # Windows, or another library of threads
        return torch.set_num_threads
    other = 1 if count > 1 else 2
    omp_set_num_threads(other)
    works = torch.get_num_threads() == other
    omp_set_num_threads(count)
    return omp_set_num_threads if works else torch.set_num_threads
