"""The peak memory of a call, and the cost of memory that the system hands out page by page."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from prepare.core.model.devices import wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

_STATUS, _CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
# Linux: "5" resets VmHWM to the memory that is resident now; see proc(5).
_RESET_PEAK = "5"
_PROBE_BYTES = 1 << 25  # size of the area that measures the cost of a page fault


def measure_peak(
    work: Callable[[], object], devices: Collection[torch.device]
) -> tuple[int | None, str]:
    """Run `work`, which uses `devices`; return the peak of its memory in bytes, and the name of the measure.

    On CUDA the figure is exact for memory that torch allocates, and the sum of the peaks of all GPUs. On the
    CPU it counts the pages that became resident: it includes pages that another thread touched meanwhile,
    excludes memory that the C library kept in reserve, and is rounded to pages (2 MiB where Linux gives huge
    pages). It is good to a few MiB. It is None where the system does not report it.
    """
    if gpus := [device for device in devices if device.type == "cuda"]:
        return _cuda_peak(work, gpus), "torch.cuda.max_memory_allocated"
    if all(device.type == "cpu" for device in devices) and _reset_peak():
        before = _read_status("VmRSS")
        work()
        after = _read_status("VmHWM")
        measure = "VmHWM of the process"
        if before is None or after is None:
            return None, measure
        return max(0, after - before), measure
    work()
    return None, ""


def page_faults() -> int:
    """Return how many pages the system has handed to this process so far, 0 if unknown.

    A page is handed out when it is first written. Memory that the C library returns to the system after
    one call is handed out again in the next.
    """
    try:
        import resource
    except ImportError:  # Windows
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def seconds_per_page_fault() -> float:
    """Measure the cost of a page fault: the time of a first write minus that of a second, per page.

    The write uses as many threads as torch has.
    """
    # Private and anonymous, as an allocator requests it; shared pages cost more.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    area = torch.frombuffer(mmap.mmap(-1, _PROBE_BYTES, flags=flags), dtype=torch.uint8)
    before, start = page_faults(), time.perf_counter()
    area.fill_(1)
    first, pages = time.perf_counter() - start, page_faults() - before
    start = time.perf_counter()
    area.fill_(1)
    second = time.perf_counter() - start
    return max(0.0, first - second) / max(1, pages)


def _cuda_peak(work: Callable[[], object], gpus: Collection[torch.device]) -> int:
    wait_for(gpus)
    before = sum(map(torch.cuda.memory_allocated, gpus))
    for gpu in gpus:
        torch.cuda.reset_peak_memory_stats(gpu)
    work()
    wait_for(gpus)
    return sum(map(torch.cuda.max_memory_allocated, gpus)) - before


def _reset_peak() -> bool:
    """Reset the peak of the process; return False where the system does not allow it."""
    # glibc keeps freed memory. Once returned to the system, it counts again when it is reused.
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    try:
        _CLEAR_REFS.write_text(_RESET_PEAK)
    except OSError:  # not Linux, or a container that forbids it
        return False
    return True


def _read_status(key: str) -> int | None:
    match = re.search(rf"^{key}:\s+(\d+) kB", _STATUS.read_text(), re.MULTILINE)
    return int(match[1]) * 1024 if match else None
