"""Reads and writes safetensors: eight bytes of length, a JSON header, and the raw bytes of each tensor.

The package `safetensors` maps the whole file into memory, and copies a whole model to save it; here
each tensor is read where it is to be, and written as it comes. The format is described at
https://huggingface.co/docs/safetensors.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from prepare.checkpoint.stored_tensor import Stored, problem, raw, rows_at_once, several
from prepare.errors import CheckpointError, Problem

_DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool",
    "U16": "uint16", "U32": "uint32", "U64": "uint64", "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
}  # fmt: skip
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
_LARGEST_HEADER = 100_000_000  # the limit of the format itself
_REMEDY = "it is cut short or damaged: fetch or save it again"


class Writer(Protocol):
    """What bytes are written to."""

    def write(self, data: bytes | memoryview) -> int:
        """Writes all of it."""


@dataclass(frozen=True, slots=True)
class _Slice(Stored):
    """A tensor whose bytes begin at `start` of the file."""

    start: int

    def pieces(self, into: Tensor) -> Iterator[tuple[int, Tensor]]:
        direct = into.device.type == "cpu" and into.dtype is self.dtype and into.is_contiguous()
        rows = rows_at_once(into.shape)
        # A tensor of its own, and a small one: it is written anew for every piece.
        buffer = into if direct else torch.empty_like(into[:rows], device="cpu", dtype=self.dtype,
                                                      memory_format=torch.contiguous_format)  # fmt: skip
        with self.file.open("rb", buffering=0) as file:
            file.seek(self.start)
            for row in range(0, len(into), rows) if into.numel() else ():
                piece = into[row : row + rows] if direct else buffer[: len(into) - row]
                rest = raw(piece)
                while rest:
                    if not (count := file.readinto(rest)):
                        raise self.error("ends in the midst of it", _REMEDY)
                    rest = rest[count:]
                yield row, piece


def is_safetensors(beginning: bytes) -> bool:
    """Whether a file with these first bytes can be one: a length, and the header's bracket."""
    return len(beginning) >= 9 and beginning[8:9] == b"{"


def read_header(path: Path) -> dict[str, Stored]:
    """Every tensor of the file, by name; none of its values are read.

    Raises:
        CheckpointError: the header is damaged, or does not fit the file's size.
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        size = path.stat().st_size - 8
        if length > min(size, _LARGEST_HEADER):
            wrong = f"says that its header has {length:,} bytes, and {max(size, 0):,} follow"
            raise CheckpointError.of([problem(path, None, wrong, _REMEDY)])
        text = file.read(length)
    try:
        header = json.loads(text.decode(), object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        wrong = f"its header cannot be read: {str(error)[:100]}"
        raise CheckpointError.of([problem(path, None, wrong, _REMEDY)]) from error
    return _slices(path, header, 8 + length, size - length)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name stands in it twice")
    return found


def _slices(path: Path, header: Any, start: int, size: int) -> dict[str, Stored]:
    if not isinstance(header, dict):
        raise CheckpointError.of([problem(path, None, "its header is no mapping", _REMEDY)])
    entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
    problems = [p for name, entry in entries.items() for p in _wrong(path, name, entry)]
    if problems:
        raise several(problems)
    end = 0
    # What the format promises, and what tells a file that was cut or put together wrongly: no gaps.
    for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
        begin, stop = entry["data_offsets"]
        if begin != end:
            wrong = f"begins at byte {begin:,}, and the one before it ends at {end:,}"
            raise CheckpointError.of([problem(path, name, wrong, _REMEDY)])
        end = stop
    if end != size:
        wrong = f"holds {size:,} bytes of values, and its header speaks of {end:,}"
        raise CheckpointError.of([problem(path, None, wrong, _REMEDY)])
    return {
        name: _Slice(path, name, getattr(torch, _DTYPES[entry["dtype"]]), tuple(entry["shape"]),
                     start + entry["data_offsets"][0])
        for name, entry in entries.items()
    }  # fmt: skip


def _wrong(path: Path, name: str, entry: Any) -> Iterator[Problem]:
    """What is wrong with one entry of the header."""
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        yield problem(path, name, "has no dtype, shape and data_offsets in the header", _REMEDY)
    elif not hasattr(torch, _DTYPES.get(str(entry["dtype"]), "no such type")):
        yield problem(path, name, f"has the dtype {entry['dtype']!r}, which torch does not have")
    elif not (_counts(entry["shape"]) and _counts(entry["data_offsets"], 2)):
        yield problem(path, name, "has a shape or offsets that are no counts", _REMEDY)
    else:
        begin, stop = entry["data_offsets"]
        needed = prod(entry["shape"]) * getattr(torch, _DTYPES[entry["dtype"]]).itemsize
        if stop - begin != needed:
            wrong = f"has {stop - begin:,} bytes, and its shape {entry['shape']} needs {needed:,}"
            yield problem(path, name, wrong[:300], _REMEDY)


def _counts(values: Any, length: int | None = None) -> bool:
    right = isinstance(values, list) and length in (None, len(values))
    return right and all(type(value) is int and 0 <= value < 2**63 for value in values)


def header_of(tensors: Mapping[str, Tensor]) -> bytes:
    """The length and the header of a file that holds these tensors one after the other.

    Raises:
        ValueError(the tensor's name, what is wrong): the format has no such type or name.
    """
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        code = _CODES.get(str(tensor.dtype).removeprefix("torch."))
        if code is None or name == "__metadata__":
            what = "that name" if code else str(tensor.dtype).removeprefix("torch.")
            raise ValueError(name, f"safetensors has no place for {what}")
        begin, end = end, end + tensor.nbytes
        entries[name] = {"dtype": code, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that values begin at a multiple of 8
    return len(text).to_bytes(8, "little") + text
