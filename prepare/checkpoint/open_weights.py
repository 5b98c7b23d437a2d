"""Open weights: a safetensors file, a file of torch, or the index of several, told apart by their content."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from prepare.checkpoint.file_formats import (
    is_safetensors,
    is_torch_file,
    read_safetensors,
    read_torch,
)
from prepare.checkpoint.manifest import Manifest, read_manifest
from prepare.checkpoint.paths import INDEX, beside, instead
from prepare.checkpoint.stored_tensor import StoredTensor, printable_name, problem, several
from prepare.core.utils import files, json_records
from prepare.errors import CheckpointError, ConfigError, FileError

# Seconds to wait for a writer that replaces the file again and again.
_PATIENCE = 30.0
# Seconds for which a pair of files with two times is new, and how often and long it is looked at again.
_NEW, _LOOKS, _PAUSE = 5.0, 10, 0.02
# The most characters of the name of a shard.
_LONGEST = 256
Rename = Callable[[str], str | None]


@dataclass(frozen=True, slots=True)
class OpenedWeights:
    """The tensors of a checkpoint, by the names that a model knows them by.

    `versions` is the metadata of modules that is not `{"version": 1}`; None if it is not known.
    `digests` maps a name in the file to the sha256 that its values must have.
    """

    path: Path
    stored: Mapping[str, StoredTensor]
    versions: Mapping[str, Any] | None
    manifest: Manifest | None
    digests: Mapping[str, str]

    def place_of(self, path: str) -> tuple[Path, str]:
        """Return the file with the tensor that the model calls `path`, and its name there."""
        stored = self.stored.get(path)
        return (stored.file, stored.name) if stored else (self.path, path)


def open_weights(
    path: Path,
    *,
    key: str | None = None,
    strip: str | None = None,
    rename: Rename | None = None,
    check: str = "auto",
) -> OpenedWeights:
    """Open the weights at `path` and their manifest; read no values.

    `strip` is a prefix that is taken off the names, before `rename`.

    While another process saves over them, they are opened again until both are of one version.

    Raises:
        CheckpointError: the file is damaged, or has a format that is not supported.
        ConfigError: no name begins with `strip`.
    """
    deadline = time.monotonic() + _PATIENCE
    while True:
        before, late = _file_states(path), time.monotonic() > deadline
        try:
            opened = _open(path, key, strip, rename, check)
        except CheckpointError:
            if late or _is_settled(path, before):
                raise
        else:
            if late or _is_settled(path, before):
                return opened


def _file_states(path: Path) -> list[tuple[int, int, int] | None]:
    """Return what tells one version of the weights, and of their manifest, from the next."""
    found: list[tuple[int, int, int] | None] = []
    for each in (path, beside(path)):
        try:
            status = each.stat()
            found.append((status.st_mtime_ns, status.st_ino, status.st_size))
        except (OSError, ValueError):
            found.append(None)
    return found


def _is_settled(path: Path, before: list[tuple[int, int, int] | None]) -> bool:
    """Return whether nobody has saved since `before`, or was about to replace the second file."""
    weights, manifest = before
    if weights and manifest and weights[0] != manifest[0]:
        # A copy of them may have two times; only what is new may be one of `save` that is not whole yet.
        newest = max(weights[0], manifest[0]) / 1e9
        for _ in range(_LOOKS if abs(time.time() - newest) < _NEW else 0):
            time.sleep(_PAUSE)
            if _file_states(path) != before:
                return False
    return _file_states(path) == before


def _open(
    path: Path, key: str | None, strip: str | None, rename: Rename | None, check: str
) -> OpenedWeights:
    stored, versions = _read(path, key)
    manifest = read_manifest(path)
    if check == "always" and manifest is None:
        remedy = "save it with prepare.checkpoint.save, or take check='auto'"
        wrong = f"has no {beside(path).name} beside it, so nothing can be checked"
        raise CheckpointError(files.printable_path(path), wrong, remedy)
    digests: dict[str, str] = {}
    if manifest:
        versions, tied = manifest.versions, manifest.tied
        if check != "never":
            manifest.check(path, stored)
            digests = {tensor.name: tensor.sha256 for tensor in manifest.tensors}
            digests |= {name: digests[first] for name, first in tied.items()}
        stored = stored | {name: stored[first] for name, first in tied.items() if first in stored}
    for each in (_stripping(path, stored, strip) if strip else None, rename):
        if each:
            stored, versions = _renamed(path, stored, each), None
    return OpenedWeights(path, stored, versions, manifest, digests)


def _read(path: Path, key: str | None) -> tuple[dict[str, StoredTensor], Mapping[str, Any] | None]:
    if path.name.endswith(INDEX):
        return _read_index(path), None
    beginning = _beginning(path)
    if key is not None and not is_torch_file(beginning):
        wrong = f"has no entries, so none called {key!r}"
        raise CheckpointError(
            files.printable_path(path), wrong, "drop key=: it is for torch's files"
        )
    if is_torch_file(beginning):
        return read_torch(path, key)
    if not is_safetensors(beginning):
        what = "is empty" if not beginning else "is neither a safetensors file nor one of torch's"
        remedy = "give .safetensors, or what torch.save wrote (since 1.6; older: save it again)"
        raise CheckpointError(files.printable_path(path), what, remedy)
    return read_safetensors(path), None


def _read_index(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of all files that an index names; these are in its folder."""
    try:
        index = json_records.parse_json(files.read_text(path, limit=json_records.LIMIT))
        shards = {str(name): str(file) for name, file in index["weight_map"].items()}
    except FileError as error:
        raise CheckpointError.of(error.problems) from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        wrong = f"is not an index of weights: {type(error).__name__}: {str(error)[:100]}"
        remedy = "it holds {weight_map: {tensor: file}}"
        raise CheckpointError(files.printable_path(path), wrong, remedy) from error
    shard_tensors: dict[str, dict[str, StoredTensor]] = {}
    for shard in dict.fromkeys(shards.values()):
        if not 0 < len(shard) < _LONGEST or Path(shard).name != shard or shard.endswith(INDEX):
            wrong = f"names the file {printable_name(shard)}, which is not in its folder"
            remedy = "put all shards beside the index"
            raise CheckpointError(files.printable_path(path), wrong, remedy)
        shard_tensors[shard], _ = _read(path.with_name(shard), None)
    lacking = [problem(path.with_name(shard), name, f"is not there, and {path.name} says it is")
               for name, shard in shards.items() if name not in shard_tensors[shard]]  # fmt: skip
    if lacking:
        raise several(lacking)
    return {name: shard_tensors[shard][name] for name, shard in shards.items()}


def _beginning(path: Path) -> bytes:
    try:
        with open(path, "rb", opener=files.open_regular) as file:
            return file.read(16)
    except (OSError, ValueError) as error:  # a name that is not Unicode, or holds a null
        wrong = f"cannot be read: {getattr(error, 'strerror', None) or error}"
        raise CheckpointError(files.printable_path(path), wrong, instead(path)) from error


def stripped(name: str, prefix: str) -> str:
    """Return a name without a prefix; without `_orig_mod.`, of torch.compile, wherever it stands."""
    return name.replace(prefix, "") if prefix == "_orig_mod." else name.removeprefix(prefix)


def _stripping(path: Path, stored: Mapping[str, StoredTensor], strip: str) -> Rename:
    prefix = f"{strip.removesuffix('.')}."
    if stored and all(stripped(name, prefix) == name for name in stored):
        wrong = f"no name in {files.printable_path(path)} begins with {prefix!r}"
        raise ConfigError("strip", wrong, f"the first is {printable_name(next(iter(stored)))}")
    return partial(stripped, prefix=prefix)


def _renamed(
    path: Path, stored: Mapping[str, StoredTensor], rename: Rename
) -> dict[str, StoredTensor]:
    """Return the tensors under the names that `rename` returns, without those for which it returns None."""
    renamed: dict[str, StoredTensor] = {}
    for name, tensor in stored.items():
        new = rename(name)
        if new in renamed:
            wrong = f"is renamed to {new!r}, and so is {renamed[new].name}"
            raise CheckpointError.of([problem(path, name, wrong, "mend rename= or strip=")])
        if new is not None:
            renamed[new] = tensor
    return renamed
