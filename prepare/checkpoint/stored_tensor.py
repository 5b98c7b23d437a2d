"""One tensor of a file of weights: its dtype, its shape, and its values in pieces."""

import ctypes
import hashlib
import mmap
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from prepare.core.model.memory_format import satisfied
from prepare.core.utils import files
from prepare.errors import CheckpointError, Problem

# Elements of a piece: it stays in the cache while it is read, hashed, cast and copied.
_PIECE = 2**19
# Only Linux drops such pages at once; elsewhere the advice means something else, or nothing.
_DROP = getattr(mmap, "MADV_DONTNEED", None) if sys.platform == "linux" else None
_LONGEST_NAME = 200
_MOST_PROBLEMS = 20


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a file.

    `values` is a view of the mapped file: no value is read before it is used. `droppable` says that
    its pages can be given back to the system, because the file still has them.
    """

    file: Path
    name: str
    values: Tensor
    droppable: bool

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in the file."""
        return self.values.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in the file."""
        return tuple(self.values.shape)

    def pieces(self) -> Iterator[tuple[int, Tensor]]:
        """Yield `(row, rows)` from the first row to the last: some contiguous rows, and the first's number.

        A tensor without dimensions has one row. The memory of a piece is dropped after its turn.
        """
        source = self.values.detach()
        source = source if source.dim() else source.unsqueeze(0)
        rows = max(1, _PIECE // max(1, prod(source.shape[1:])))
        for row in range(0, len(source), rows) if source.numel() else ():
            piece = source[row : row + rows]
            yield row, piece.contiguous().resolve_conj().resolve_neg()
            # Only a piece without gaps, in any order of its dimensions: it has these pages for itself.
            if self.droppable and satisfied(tuple(piece.shape), piece.stride()):
                drop_pages(piece)

    def digest(self) -> str:
        """Return the sha256 of the values in contiguous order."""
        hashed = hashlib.sha256()
        for _, piece in self.pieces():
            hashed.update(raw(piece))
        return hashed.hexdigest()

    def error(self, wrong: str, remedy: str = "") -> CheckpointError:
        """Return the error that names this tensor."""
        return CheckpointError.of([problem(self.file, self.name, wrong, remedy)])


def problem(file: Path, tensor: str, wrong: str, remedy: str = "") -> Problem:
    """Return a problem of one tensor in a file; any name is made printable on one line."""
    return Problem(f"{files.printable_path(file)}, {printable_name(tensor)}", wrong, remedy)


def several(problems: Sequence[Problem], remedy: str = "") -> CheckpointError:
    """Return one error of the first problems; the last one has the remedy, and the number of others."""
    *first, last = problems[:_MOST_PROBLEMS]
    more = len(problems) - _MOST_PROBLEMS
    wrong = f"{last.wrong} (and {more} more)" if more > 0 else last.wrong
    return CheckpointError.of([*first, Problem(last.where, wrong, remedy or last.remedy)])


def printable_name(tensor: str) -> str:
    """Return the name of a tensor as it can be printed on one line."""
    return files.printable_path(
        tensor if len(tensor) <= _LONGEST_NAME else f"{tensor[:_LONGEST_NAME]}..."
    )


def drop_pages(read: Tensor) -> None:
    """Release the memory of a dense tensor that is mapped from a file and has been read.

    Only for such a tensor: data that is only in memory would be lost. The tensor can be read again,
    from the file.
    """
    if _DROP is not None:
        start = -(-read.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        length = (read.data_ptr() + read.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - start
        if length > 0:
            madvise = ctypes.CDLL(None).madvise
            madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), _DROP)


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


def digest(tensor: Tensor) -> str:
    """Return the sha256 of the values of a tensor in contiguous order."""
    values = tensor.detach().to("cpu").resolve_conj().resolve_neg().contiguous()
    return hashlib.sha256(raw(values)).hexdigest()


def raw(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor, in place; NumPy, if installed, has no bfloat16."""
    if not tensor.nbytes:
        return memoryview(b"")
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")
