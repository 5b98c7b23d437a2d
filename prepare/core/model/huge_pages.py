"""Ask for huge pages for memory that is about to be written, and drop the pages of a file that was read.

The system provides fresh memory page by page at the first write, and with pages of 4 KiB this takes
longer than the copy itself: `benchmarks/prepare_cost.py`. Where Linux is set to `madvise`, as in most
distributions, it gives pages of 2 MiB on request; torch requests them only if the environment
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
    """Return the same tensor; request huge pages for a large one on a CPU, if the system has them."""
    if _ADVICE is not None and fresh.device.type == "cpu" and fresh.nbytes >= _LEAST:
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
def _libc() -> Any:
    return ctypes.CDLL(None)
