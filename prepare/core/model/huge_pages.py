"""Asks the system for huge pages under memory that is about to be written, and gives back what was read.

Fresh memory comes from the system page by page as it is first written, and with pages of 4 KiB that
takes longer than the copy itself: `benchmarks/prepare_cost.py`. Linux gives pages of 2 MiB to whoever
asks, where it is set to `madvise`, as most distributions are; torch asks only if the environment
variable THP_MEM_ALLOC_ENABLE was set at its start.
"""

import ctypes
import mmap
import sys
from functools import cache
from pathlib import Path
from typing import Any

from torch import Tensor

_LEAST = 1 << 22  # bytes; below, few huge pages fit, and the allocator has likely touched it before
_ADVICE = getattr(mmap, "MADV_HUGEPAGE", None)
# Only Linux drops such pages at once; elsewhere the advice means something else, or nothing.
_DROP = getattr(mmap, "MADV_DONTNEED", None) if sys.platform == "linux" else None


def huge_pages(fresh: Tensor) -> Tensor:
    """The same tensor; a large one on a CPU is given huge pages where the system has them."""
    if _ADVICE is not None and fresh.device.type == "cpu" and fresh.nbytes >= _LEAST:
        start = -(-fresh.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        length = fresh.data_ptr() + fresh.nbytes - start
        # Advice only: a system that refuses it says so in the result, and nothing is lost.
        _libc().madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), _ADVICE)
    return fresh


def drop_pages(read: Tensor) -> None:
    """Gives back the memory of a tensor without gaps that is mapped from a file, and has been read.

    Only for such a tensor: what is in memory alone is lost. It may be read again, from the file.
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
def _libc() -> Any:
    return ctypes.CDLL(None)
