"""Ask for huge pages for memory that is about to be written, and drop the pages of a file that was read.

The system provides fresh memory page by page at the first write, and with pages of 4 KiB this can take
longer than the copy itself: `benchmarks/prepare_cost.py`. Where Linux is set to `madvise`, as in most
distributions, it gives pages of 2 MiB on request; torch requests them only if the environment
variable THP_MEM_ALLOC_ENABLE was set at its start. On some machines a huge page costs more than the small
ones, so the first request of a process times both.
"""

import ctypes
import mmap
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

from torch import Tensor

_LEAST = 1 << 22  # bytes; below, few huge pages fit, and the allocator has likely touched it before
_ADVICE: int | None = getattr(mmap, "MADV_HUGEPAGE", None)
_HUGE = 1 << 21  # bytes of a huge page
_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
# Only Linux drops such pages at once; elsewhere the advice means something else, or nothing.
_DROP = getattr(mmap, "MADV_DONTNEED", None) if sys.platform == "linux" else None


def huge_pages(fresh: Tensor) -> Tensor:
    """Return the same tensor; request huge pages for a large one on a CPU, if they are faster here."""
    if fresh.device.type == "cpu" and fresh.nbytes >= _LEAST and _pays():
        start = -(-fresh.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        length = fresh.data_ptr() + fresh.nbytes - start
        # The result is ignored: the advice may be refused without harm.
        _libc().madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), _ADVICE)
    return fresh


def drop_pages(read: Tensor) -> None:
    """Release the memory of a dense tensor that is mapped from a file and has been read.

    Only for such a tensor: data that is only in memory would be lost. The tensor can be read again,
    from the file.
    """
    if _DROP is not None:
        start = -(-read.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        length = (read.data_ptr() + read.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - start
        if length > 0:
            _libc().madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), _DROP)


def is_mapped_file(tensor: Tensor) -> bool:
    """Return whether the memory of `tensor` is mapped from a file; False where Linux cannot be asked."""
    address = tensor.data_ptr()
    try:
        mappings = Path("/proc/self/maps").read_text(errors="replace").splitlines()
    except OSError:
        return False
    for mapping in mappings:
        bounds, _permissions, _offset, _device, inode, *_ = mapping.split(maxsplit=5)
        first, end = (int(bound, 16) for bound in bounds.split("-"))
        if first <= address < end:
            return inode != "0"
    return False


@cache
def _pays() -> bool:
    """Return whether huge pages can be requested, and one is written faster than as much in small pages."""
    if _ADVICE is None:
        return False
    try:
        if "[madvise]" not in _SETTING.read_text():
            return False  # the system gives them always, or never
        rounds = [(_seconds_to_write(None), _seconds_to_write(_ADVICE)) for _ in range(3)]
    except OSError:
        return False
    small, huge = (min(seconds) for seconds in zip(*rounds, strict=True))
    return huge < small


def _seconds_to_write(advice: int | None) -> float:
    """Return the time of this thread for the first write to two megabytes of new memory."""
    with mmap.mmap(-1, 2 * _HUGE) as memory:
        start = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % _HUGE
        if advice is not None:
            memory.madvise(advice, start, _HUGE)
        before = time.thread_time()
        for place in range(start, start + _HUGE, mmap.PAGESIZE):
            memory[place] = 1
        return time.thread_time() - before


@cache
def _libc() -> Any:
    return ctypes.CDLL(None)
