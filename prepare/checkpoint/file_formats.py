"""Read files of weights, only mapped: those of the package `safetensors`, and those of `torch.save`."""

import pickletools
import sys
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from prepare.checkpoint.stored_tensor import (
    StoredTensor,
    is_mapped_file,
    printable_name,
    problem,
    several,
)
from prepare.core.model.tensors import is_plain
from prepare.core.utils.files import open_regular, printable_path
from prepare.core.utils.json_records import check_memory
from prepare.core.utils.suggest import choose
from prepare.core.utils.wording import words
from prepare.errors import CheckpointError, Problem


def is_safetensors(beginning: bytes) -> bool:
    """Return whether a file with these first bytes can be one: a length, and the header's bracket."""
    return len(beginning) >= 9 and beginning[8:9] == b"{"


def read_safetensors(path: Path) -> dict[str, StoredTensor]:
    """Return every tensor of the file, by name, in the order of the file; no value is read.

    Raises:
        CheckpointError: the header is damaged, or does not fit the file's size.
    """
    try:
        with open(path, "rb", opener=open_regular) as opened:
            header = opened.read(min(int.from_bytes(opened.read(8), "little"), _LARGEST_PICKLE + 1))
            _check_header(header)
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except Exception as error:  # also what torch raises for a dtype that it lacks
        reason = str(error).removeprefix("Error while deserializing header: ")[:160]
        wrong = f"cannot be read as safetensors: {printable_path(reason)}"
        raise CheckpointError(printable_path(path), wrong, _DAMAGED) from error
    # The values of a copy in memory are nowhere else: only pages of the file may be dropped.
    first = next((tensor for tensor in tensors.values() if tensor.numel()), None)
    droppable = first is not None and is_mapped_file(first)
    in_order = sorted(tensors.items(), key=lambda item: item[1].data_ptr())
    return {name: StoredTensor(path, name, tensor, droppable) for name, tensor in in_order}


_DAMAGED = "it is cut short or damaged: fetch or save it again"
_AGAIN = "save it with torch.save(model.state_dict(), FILE), and nothing but tensors in it"
_LARGEST_PICKLE, _LONGEST_ORDER = 1 << 25, 16
# Tensors of a safetensors file, or records of torch's, as each takes its time; bytes of the list of these.
_MOST_TENSORS, _LARGEST_LIST = 20_000, 5_000_000
# Operations of a pickle, each of 10 us: in any file, and one more for so many bytes of it. A tensor takes 30.
_OPERATIONS, _BYTES_EACH = 80_000, 1_000
# Characters of the name of a class: torch searches its own message of an unknown one in quadratic time.
_LONGEST_NAME = 1_000
# Values that are hashed: a tuple of the same tuple twice, sixty times over, has 2**60.
_MOST_HASHED = 4_000_000
# What the operations of a pickle without code take off the stack, for one value each; marks are apart.
_TAKEN = {"BINPERSID": 1, "NEWOBJ": 2, "REDUCE": 2, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_LEFT_IN_PLACE = {"BUILD": 1, "APPEND": 1, "SETITEM": 2}
_MOST_KEYS = 5


def _check_header(header: bytes) -> None:
    """Raise ValueError if the header of a safetensors file would take too long, or fill the memory."""
    if len(header) > _LARGEST_PICKLE or header.count(b'"data_offsets"') > _MOST_TENSORS:
        raise ValueError(f"it describes more than {_MOST_TENSORS:,} tensors")
    check_memory(header)


def is_torch_file(beginning: bytes) -> bool:
    """Return True if a file with these first bytes can be one: a zip archive, as torch writes since 1.6."""
    return beginning[:4] == b"PK\x03\x04"


def read_torch(
    path: Path, key: str | None
) -> tuple[dict[str, StoredTensor], Mapping[str, Any] | None]:
    """Return every tensor of the file, by name, and the versions of the modules that were saved.

    `key` is the entry with the tensors, in a file that contains more than weights.

    Raises:
        CheckpointError: the file is damaged, or contains something else than tensors.
    """
    _check_archive(path)
    mapped: set[int] = set()

    def keep(storage: torch.UntypedStorage, _location: str) -> torch.UntypedStorage:
        mapped.add(storage.data_ptr())
        return storage

    try:
        # Tensors that were saved from an accelerator stay in the mapped file as well.
        content = torch.load(
            path,
            map_location=keep,  # type: ignore[arg-type]  # torch passes an UntypedStorage
            weights_only=True,
            mmap=True,
        )
    except Exception as error:
        raise _refused(path, error) from error
    state = _state(path, content, key)
    problems = [p for name, tensor in state.items() for p in _wrong(path, name, tensor)]
    if problems:
        raise several(problems)
    stored = {
        name: StoredTensor(path, name, tensor, tensor.untyped_storage().data_ptr() in mapped)
        for name, tensor in state.items()
    }
    versions = getattr(state, "_metadata", None)
    return stored, versions if isinstance(versions, Mapping) else None


def _check_archive(path: Path) -> None:
    """Refuse an archive that torch would not have written, before torch reads it.

    Compressed records grow when they are read, and torch has had vulnerabilities in reading them.
    """
    try:
        with open(path, "rb", opener=open_regular) as file:
            end = zipfile._EndRecData(file)  # type: ignore[attr-defined]  # ZipFile reads the whole list
        if end and end[zipfile._ECD_SIZE] > _LARGEST_LIST:  # type: ignore[attr-defined]
            raise ValueError(f"it has more than {_MOST_TENSORS:,} records")
        with zipfile.ZipFile(path) as archive:
            records = archive.infolist()
            if len(records) > _MOST_TENSORS:
                raise ValueError(f"it has more than {_MOST_TENSORS:,} records")
            names = {record.filename.partition("/")[2]: record for record in records}
            most = {"byteorder": _LONGEST_ORDER, "data.pkl": _LARGEST_PICKLE}
            large = any(names[name].file_size > most[name] for name in most.keys() & names.keys())
            compressed = any(r.compress_type or r.file_size != r.compress_size for r in records)
            readable = {} if large or compressed else most.keys() & names.keys()
            content = {name: archive.read(names[name]) for name in readable}
            order = content.get("byteorder", b"").decode()
    except Exception as error:  # the standard library raises many kinds over a damaged archive
        wrong = f"its archive cannot be read: {type(error).__name__}: {str(error)[:100]}"
        raise CheckpointError(printable_path(path), wrong, _DAMAGED) from error
    wrong = ""
    if compressed or len(names) != len(records):
        wrong = "its records are compressed, or in it twice: torch does not write such a file"
    elif "constants.pkl" in names:
        wrong = "is a TorchScript model, which is code"
    elif "data.pkl" not in names or large:
        wrong = "is an archive that torch did not write"
    else:
        wrong = _explodes(content["data.pkl"], _OPERATIONS + path.stat().st_size // _BYTES_EACH)
    if wrong:
        raise CheckpointError(printable_path(path), wrong, _AGAIN)
    if order not in ("", sys.byteorder):
        wrong = f"was written on a machine that is {order}-endian, and this one is {sys.byteorder}"
        raise CheckpointError(printable_path(path), wrong, "save it as safetensors there")


def _explodes(pickled: bytes, most: int) -> str:  # noqa: PLR0912  one kind of operation each
    """Return what is wrong with a pickle that is small and takes hours or all memory to read; or "".

    It has at most `most` operations.
    The values of a list are 1 here: only tuples are hashed with all that is in them.
    """
    stack: list[int] = []
    marks: list[int] = []
    memo: dict[Any, int] = {}
    hashed = 0
    try:
        for count, (operation, argument, _) in enumerate(pickletools.genops(pickled)):
            name = operation.name
            if name in ("PROTO", "STOP"):
                continue
            if name == "GLOBAL" and len(str(argument)) > _LONGEST_NAME:
                return "names a class by more than 1,000 characters: torch did not write it"
            if name == "MARK":
                marks.append(len(stack))
            elif name in ("BINPUT", "LONG_BINPUT"):
                memo[argument] = stack[-1]
            elif name in ("BINGET", "LONG_BINGET"):
                stack.append(memo[argument])
            elif name in ("TUPLE", "APPENDS", "SETITEMS"):
                start = marks.pop()
                hashed += sum(stack[start::2]) if name == "SETITEMS" else 0
                values = sum(stack[start:])
                del stack[start:]
                if name == "TUPLE":
                    stack.append(1 + values)
            elif name in _LEFT_IN_PLACE:
                hashed += stack[-2] if name == "SETITEM" else 0
                del stack[-_LEFT_IN_PLACE[name] :]
            else:
                taken = _TAKEN.get(name, 0)
                values = sum(stack[len(stack) - taken :])
                del stack[len(stack) - taken :]
                hashed += values if name == "REDUCE" else 0
                stack.append(1 + values if name.startswith("TUPLE") else 1)
            if count > most:
                return "describes more values than are read from a file of its size, other than safetensors"
            if hashed > _MOST_HASHED or (stack and stack[-1] > _MOST_HASHED):
                return "is a small description of more values than any model has: torch did not write it"
    except Exception as error:  # what is damaged raises many kinds
        return f"its description is damaged ({type(error).__name__}: {str(error)[:100]})"
    return ""


def _refused(path: Path, error: Exception) -> CheckpointError:
    """Return one line for an error of `torch.load`, whose text is a page and advises to run the code."""
    message = str(error).replace("WeightsUnpickler error:", "\n")
    lines = [line.strip() for line in message.splitlines()]
    about = [line for line in lines if line.startswith(("Unsupported", "GLOBAL", "Can only"))]
    reason = (about or [f"{type(error).__name__}: {lines[0] if lines else ''}"])[0][:160]
    wrong = f"holds something else than tensors, or is damaged; nothing of it was run ({reason})"
    return CheckpointError(printable_path(path), wrong, _AGAIN)


def _state(path: Path, content: Any, key: str | None) -> Mapping[str, Any]:
    """Return the mapping of names to tensors: the whole content, or its only entry that is one."""
    if key is not None:
        entries = content if isinstance(content, Mapping) else {}
        if key not in entries or not _is_state(entries[key]):
            wrong = f"has no tensors under {key!r}"
            remedy = choose(key, _inner(content), noun="entries with tensors")
            raise CheckpointError(printable_path(path), wrong, remedy)
        return entries[key]
    if _is_state(content):
        return content
    inner = _inner(content)
    if len(inner) == 1:
        return content[inner[0]]
    wrong = f"does not hold a mapping of names to tensors, but {_described(content)}"
    remedy = _AGAIN
    if inner:
        choosing = words(
            cli="save one of them in a file of its own", python=f"choose one: key={inner[0]!r}"
        )
        remedy = f"{choosing}; there are {', '.join(inner)}"
    raise CheckpointError(printable_path(path), wrong, remedy)


def _is_state(content: Any) -> bool:
    return (
        isinstance(content, Mapping)
        and all(isinstance(name, str) for name in content)
        and (
            any(isinstance(value, Tensor) for value in content.values())
            or (
                not content and hasattr(content, "_metadata")
            )  # the state of a model without tensors
        )
    )


def _inner(content: Any) -> list[str]:
    if not isinstance(content, Mapping):
        return []
    return [key for key, value in content.items() if isinstance(key, str) and _is_state(value)]


def _described(content: Any) -> str:
    if not isinstance(content, Mapping):
        return f"a {type(content).__name__}"
    first = list(content)[:_MOST_KEYS]
    keys = ", ".join(printable_name(str(k) if isinstance(k, (str, int)) else f"a {type(k).__name__}")
                     for k in first)  # fmt: skip
    return f"a {type(content).__name__} with {len(content)} entries: {keys}"[:300]


def _wrong(path: Path, name: str, tensor: Any) -> Iterator[Problem]:
    if not isinstance(tensor, Tensor):
        wrong = f"is a {type(tensor).__name__}, not a tensor"
        yield problem(path, name, wrong, "take it out of the file")
    elif not is_plain(tensor) or tensor.device.type != "cpu" or tensor.is_quantized:
        kind = "has no values" if tensor.is_meta else "is sparse, quantized or of its own kind"
        yield problem(path, name, kind, _AGAIN)
