"""The manifest of a file of weights, FILE.json beside it: the recipe, and the sha256 of every tensor."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from prepare.checkpoint.paths import beside
from prepare.checkpoint.stored_tensor import StoredTensor, printable_name, problem, several
from prepare.core.model.tensors import name_of
from prepare.core.utils import json_records
from prepare.core.utils.wording import words
from prepare.errors import CheckpointError, FileError, Problem

_KIND = json_records.Kind(
    "prepare.checkpoint", 1, "a manifest of a checkpoint", "the one it was saved with", CheckpointError
)  # fmt: skip

_TYPES = {
    "tied": dict[str, str],
    "versions": dict[str, Any],
    "steps": dict[str, Any] | None,
    "tensors": list[list[Any]],
}


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """One saved tensor; `sha256` is that of its values in contiguous order, in that dtype."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of a file of weights.

    `tied` maps a name to the one under which the same tensor is stored. `versions` is the metadata of
    modules that is not `{"version": 1}`. `steps` is the recipe that the model was prepared with,
    `{name: options}`, or None.
    """

    tensors: tuple[SavedTensor, ...]
    tied: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, Any] = field(default_factory=dict)
    steps: dict[str, Any] | None = None

    def text(self) -> bytes:
        """Return the content of FILE.json: one tensor per line, and the sha256 of everything at the end."""
        data = _KIND.head | {
            "steps": self.steps,
            "tied": dict(self.tied),
            "versions": dict(self.versions),
            "tensors": [[t.name, t.dtype, list(t.shape), t.sha256] for t in self.tensors],
        }
        return f"{json_records.json_lines(data | {'sha256': _digest(data)})}\n".encode()

    def check(self, path: Path, stored: Mapping[str, StoredTensor]) -> None:
        """Compare the names, shapes and dtypes of the file at `path` with those that were saved.

        Raises:
            CheckpointError: with one problem for each tensor that differs.
        """
        saved_tensors = {tensor.name: tensor for tensor in self.tensors}
        problems = [
            problem(path, name, "is not in the file, and was saved", _remedy())
            for name in sorted(saved_tensors.keys() - stored.keys() - self.tied.keys())
        ]
        for name, tensor in stored.items():
            if (saved := saved_tensors.get(self.tied.get(name, name))) is None:
                problems.append(problem(path, name, "was not saved with this file", _remedy()))
            else:
                problems += _differences(path, tensor, saved)
        if problems:
            raise several(problems)


def read_manifest(path: Path) -> Manifest | None:
    """Read the manifest of the file at `path`; None if it does not exist.

    Raises:
        CheckpointError: the manifest is damaged.
    """
    place = beside(path)
    if not place.is_file():
        return None
    try:
        return json_records.read_record(place, _KIND, _manifest)
    except FileError as error:
        raise CheckpointError.of(error.problems) from error


def _manifest(data: dict[str, Any]) -> Manifest:
    if data.pop("sha256") != _digest(data):
        raise ValueError("its own sha256 is another: it was damaged or changed")
    # The sha256 shows damage, and not who has written it.
    json_records.check_values(data, _TYPES)
    held = tuple(
        SavedTensor(name, dtype, tuple(shape), sha) for name, dtype, shape, sha in data["tensors"]
    )
    for tensor in held:
        types = {"name": str, "dtype": str, "shape": list[int], "sha256": str}
        json_records.check_values(asdict(tensor) | {"shape": [*tensor.shape]}, types)
    return Manifest(held, data["tied"], data["versions"], data["steps"])


def _remedy() -> str:
    unchecked = words(
        cli="without the .json beside it nothing is checked",
        python="check='never' loads what is there, unchecked",
    )
    return f"fetch or save the file again; {unchecked}"


def _digest(data: dict[str, Any]) -> str:
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _differences(path: Path, tensor: StoredTensor, saved: SavedTensor) -> list[Problem]:
    pairs = (
        ("dtype", name_of(tensor.dtype), saved.dtype),
        ("shape", list(tensor.shape), list(saved.shape)),
    )
    return [
        problem(
            path,
            tensor.name,
            f"has the {what} {now}, and {printable_name(str(was))} was saved",
            _remedy(),
        )
        for what, now, was in pairs
        if now != was
    ]
