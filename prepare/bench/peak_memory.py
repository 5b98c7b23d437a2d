"""The most memory that a piece of work holds beyond what was there, and what fresh memory costs it."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import re
import time
from collections.abc import Callable
from pathlib import Path

import torch

try:
    import resource
except ImportError:  # Windows
    resource = None

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
# Linux: "5" sets VmHWM back to what is resident now; see proc(5).
_RESET = "5"
_AREA = 1 << 25  # bytes to find out in what a fresh page costs


def peak_of(work: Callable[[], object], device: torch.device) -> tuple[int | None, str]:
    """Bytes, and how they were found; None where that cannot be found out.

    On CUDA they are exact for what torch allocates. On the CPU they are the pages that became
    resident: so pages that another thread touched meanwhile are among them, reserves that the C
    library does not give back are not, and sizes are rounded to pages (2 MiB where Linux gives huge
    ones). They are good to a few MiB.
    """
    if device.type == "cuda":
        return _of_cuda(work, device), "torch.cuda.max_memory_allocated"
    if device.type == "cpu" and _reset():
        before = _read("VmRSS")
        work()
        after = _read("VmHWM")
        return (
            None if before is None or after is None else max(0, after - before)
        ), "VmHWM of the process"
    work()
    return None, ""


def fresh_pages() -> int:
    """How many pages the system has given to this process so far, as they were written first; 0 if unknown.

    What the C library gives back after one call it takes as fresh pages in the next.
    """
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt if resource else 0


def seconds_of_page() -> float:
    """What one costs here, with as many threads as torch has: to write it first, less to write it again."""
    flags = (
        mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    )  # as an allocator asks for it; shared ones cost more
    area = torch.frombuffer(mmap.mmap(-1, _AREA, flags=flags), dtype=torch.uint8)
    before, start = fresh_pages(), time.perf_counter()
    area.fill_(1)
    first, pages = time.perf_counter() - start, fresh_pages() - before
    start = time.perf_counter()
    area.fill_(1)
    again = time.perf_counter() - start
    return max(0.0, first - again) / max(1, pages)


def _of_cuda(work: Callable[[], object], device: torch.device) -> int:
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    work()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def _reset() -> bool:
    # glibc keeps what was freed; given back to the system, it counts again when it is needed again.
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    try:
        _CLEAR.write_text(_RESET)
    except OSError:  # not Linux, or a container that forbids it
        return False
    return True


def _read(key: str) -> int | None:
    found = re.search(rf"^{key}:\s+(\d+) kB", _STATUS.read_text(), re.MULTILINE)
    return int(found[1]) * 1024 if found else None
