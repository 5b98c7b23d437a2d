"""What stands beside a file of weights, in FILE.json: the recipe, and the sha256 of every tensor."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prepare.checkpoint.paths import beside
from prepare.checkpoint.stored_tensor import StoredTensor, problem, several
from prepare.core.model.tensors import name_of
from prepare.core.utils import json_records
from prepare.errors import CheckpointError, FileError, Problem

_KIND = json_records.Kind(
    "prepare.checkpoint", 1, "a manifest of a checkpoint", "the one it was saved with", CheckpointError
)  # fmt: skip
_REMEDY = "fetch or save the file again; check='never' loads what is there, unchecked"


@dataclass(frozen=True, slots=True)
class Held:
    """One tensor as it was saved: `sha256` is of its values in contiguous order, in that dtype."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """What was saved: `tied` maps a name to the one under which the same tensor is stored.

    `versions` is what modules write beside their tensors, where that is not `{"version": 1}`;
    `steps` is the recipe that the model was prepared with, `{name: options}`, or None.
    """

    tensors: tuple[Held, ...]
    tied: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, Any] = field(default_factory=dict)
    steps: dict[str, Any] | None = None

    def text(self) -> bytes:
        """The content of the file; one tensor a line, with the sha256 of all of it at the end."""
        data = _KIND.head | {
            "steps": self.steps,
            "tied": dict(self.tied),
            "versions": dict(self.versions),
            "tensors": [[t.name, t.dtype, list(t.shape), t.sha256] for t in self.tensors],
        }
        return f"{json_records.json_lines(data | {'sha256': _digest(data)})}\n".encode()

    def check(self, path: Path, stored: Mapping[str, StoredTensor]) -> None:
        """That the file at `path` holds what was saved, by name, shape and dtype; values are for later.

        Raises:
            CheckpointError: with one problem for each tensor that differs.
        """
        held = {one.name: one for one in self.tensors}
        problems = [
            problem(path, name, "is not in the file, and was saved", _REMEDY)
            for name in sorted(held.keys() - stored.keys() - self.tied.keys())
        ]
        for name, found in stored.items():
            if (saved := held.get(self.tied.get(name, name))) is None:
                problems.append(problem(path, name, "was not saved with this file", _REMEDY))
            else:
                problems += _differences(path, found, saved)
        if problems:
            raise several(problems)


def read_manifest(path: Path) -> Manifest | None:
    """The manifest of the file at `path`; None where there is none, as beside files of others.

    Raises:
        CheckpointError: it is damaged.
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
    held = tuple(
        Held(name, dtype, tuple(shape), sha) for name, dtype, shape, sha in data["tensors"]
    )
    return Manifest(held, data["tied"], data["versions"], data["steps"])


def _digest(data: dict[str, Any]) -> str:
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _differences(path: Path, found: StoredTensor, saved: Held) -> list[Problem]:
    pairs = (
        ("dtype", name_of(found.dtype), saved.dtype),
        ("shape", list(found.shape), list(saved.shape)),
    )
    return [
        problem(path, found.name, f"has the {what} {now}, and {was} was saved", _REMEDY)
        for what, now, was in pairs
        if now != was
    ]
