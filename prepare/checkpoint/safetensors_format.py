"""Read safetensors files with the package `safetensors`, and make the header of those we write.

The package checks the header and maps the file. It cannot write one tensor after the other: `save_file`
takes the whole model, contiguous, at once. The format: https://huggingface.co/docs/safetensors.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from safetensors import safe_open
from torch import Tensor

from prepare.checkpoint.stored_tensor import StoredTensor, problem
from prepare.core.model.huge_pages import is_mapped_file
from prepare.core.utils import files
from prepare.errors import CheckpointError

_CODES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
    "uint16": "U16", "uint32": "U32", "uint64": "U64", "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip


class Writer(Protocol):
    """A file that bytes are written to."""

    def write(self, data: bytes | memoryview) -> int:
        """Write all of `data`."""


def is_safetensors(beginning: bytes) -> bool:
    """Return whether a file with these first bytes can be one: a length, and the header's bracket."""
    return len(beginning) >= 9 and beginning[8:9] == b"{"


def read_tensors(path: Path) -> dict[str, StoredTensor]:
    """Return every tensor of the file, by name, in the order of the file; no value is read.

    Raises:
        CheckpointError: the header is damaged, or does not fit the file's size.
    """
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (
        Exception
    ) as error:  # SafetensorError, OSError, and what torch raises for a dtype it lacks
        reason = str(error).removeprefix("Error while deserializing header: ")[:160]
        wrong = f"cannot be read as safetensors: {files.printable_path(reason)}"
        remedy = "it is cut short or damaged: fetch or save it again"
        raise CheckpointError.of([problem(path, None, wrong, remedy)]) from error
    # The values of a copy in memory are nowhere else: only pages of the file may be dropped.
    first = next((tensor for tensor in tensors.values() if tensor.numel()), None)
    droppable = first is not None and is_mapped_file(first)
    in_order = sorted(tensors.items(), key=lambda item: item[1].data_ptr())
    return {name: StoredTensor(path, name, tensor, droppable) for name, tensor in in_order}


def header_of(tensors: Mapping[str, Tensor]) -> bytes:
    """Return the length and the header of a file that holds these tensors one after the other.

    Raises:
        ValueError(the tensor's name, what is wrong): the format has no such dtype or name.
    """
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in _CODES:
            raise ValueError(name, f"safetensors has no place for {dtype}")
        if name == "__metadata__" or not _is_unicode(name):
            raise ValueError(name, "safetensors has no place for that name")
        begin, end = end, end + tensor.nbytes
        entries[name] = {
            "dtype": _CODES[dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that values begin at a multiple of 8
    return len(text).to_bytes(8, "little") + text


def _is_unicode(name: str) -> bool:
    """Return whether the package can read this name: it refuses a lone surrogate."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
