"""One tensor in a file of weights: what it is, and its values piece by piece, each as it lies in the file."""

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from prepare.core.utils import files
from prepare.errors import CheckpointError, Problem

# Elements: a piece that stays in the cache while it is read, hashed, cast and laid out.
_PIECE = 2**19
_LONGEST = 200
_TOLD = 20


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor of a file. Subclasses know how its values are read."""

    file: Path
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    def pieces(self, into: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Its values from the first row to the last: the number of the row, and some rows, contiguous.

        `into` has this tensor's shape, or (1,) for a single value. Where the values can stand there
        as they are they are read right into it; else a piece holds only until the next is asked for.
        """
        raise NotImplementedError

    def error(self, wrong: str, remedy: str = "") -> CheckpointError:
        """The error of this tensor."""
        return CheckpointError.of([problem(self.file, self.name, wrong, remedy)])


def problem(file: Path, tensor: str | None, wrong: str, remedy: str = "") -> Problem:
    """What is wrong with a file, or with one tensor of it; names can hold anything, and are made one line."""
    where = files.shown(file)
    if tensor is not None:
        where += f", {named(tensor)}"
    return Problem(where, wrong, remedy)


def several(problems: Sequence[Problem], remedy: str = "") -> CheckpointError:
    """One error of the first problems; the last of them says what to do, and how many more there are."""
    *first, last = problems[:_TOLD]
    more = len(problems) - _TOLD
    wrong = f"{last.wrong} (and {more} more)" if more > 0 else last.wrong
    return CheckpointError.of([*first, Problem(last.where, wrong, remedy or last.remedy)])


def named(tensor: str) -> str:
    """The name of a tensor as it can be printed on one line."""
    return files.shown(tensor if len(tensor) <= _LONGEST else f"{tensor[:_LONGEST]}...")


def rows_at_once(shape: tuple[int, ...]) -> int:
    """How many rows make a piece."""
    return max(1, _PIECE // max(1, prod(shape[1:])))


def raw(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, in place; numpy knows no bfloat16, and may not be there."""
    if not tensor.nbytes:
        return memoryview(b"")
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")
