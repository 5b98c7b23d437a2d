"""The manifest of a sweep, `sweep.json` in its folder: its rows, and what makes two of them the same."""

from __future__ import annotations

import hashlib
import json
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from prepare.app.job.model_target import targets_in
from prepare.core.utils.json_records import JsonRecord, Kind
from prepare.core.utils.packages import version_of

if TYPE_CHECKING:
    from prepare.app.job.record import Job

# Options that change how a job is executed, not its result.
_WITHOUT_EFFECT = ("isolate", "resume", "overwrite")
# The groups of entry points whose packages take part in a job.
_PLUGINS = ("prepare.", "torch_dynamo_backends")
_LENGTH = 16


@dataclass(frozen=True, slots=True)
class SweepManifest(JsonRecord):
    """The rows that a sweep shall have.

    Attributes:
        sweep: the name of the sweep.
        rows: the overrides of each row.
        identities: `identity_of` each row, each once.
        command: the command line, as it was typed.
        host: the machine of the command that leads it; empty where nobody can see whether it still does.
    """

    KIND: ClassVar[Kind] = Kind("prepare.sweep", "a sweep", "the sweep.json of a sweep")
    sweep: str
    rows: list[list[str]]
    identities: list[str]
    command: str = ""
    host: str = ""

    def check(self) -> None:
        """Raise ValueError for a sweep without a name, or a row without identity."""
        if not self.sweep or len(self.identities) != len(self.rows):
            raise ValueError("the sweep or one of its rows has no name")

    def number(self, job: Job) -> int | None:
        """Return the row of a job; None for a job of another sweep, or of a row that was removed."""
        known = job.sweep == self.sweep and job.identity in self.identities
        return self.identities.index(job.identity) if known and job.identity else None


def read_sweep_manifest(folder: Path) -> SweepManifest | None:
    """Read the manifest of the sweep in `folder`; None if there is no sweep. Raises FileError."""
    path = folder / "sweep.json"
    return SweepManifest.load(path) if path.is_file() else None


def identity_of(config: Mapping[str, Any], choices: Mapping[str, Any]) -> str:
    """Return the identity of a job with this resolved configuration and these choices in the groups.

    It covers the configuration, the versions of torch, prepare and the packages of plugins, and
    the code of the model and of the plugins: the file of each, or every file of its package if that is
    in the current folder, and the driver of the accelerator. It does
    not cover other files that this code imports, or the processor.
    """
    groups = [each for each in metadata.entry_points().groups if each.startswith(_PLUGINS)]
    points = [point for group in groups for point in metadata.entry_points(group=group)]
    packages = {"torch", "torch-prepare", *(point.dist.name for point in points if point.dist)}
    targets = {str(node["_target_"]) for _, node in targets_in(config, "")}
    facts = {
        "config": {key: value for key, value in config.items() if key not in _WITHOUT_EFFECT},
        "choices": dict(choices),
        "versions": {name: version_of(name) for name in sorted(packages)},
        "code": {name: _code(name) for name in sorted(targets | {*config.get("plugins", ())})},
    }
    text = json.dumps(facts, sort_keys=True, default=repr)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:_LENGTH]


def number_duplicates(identities: Iterable[str]) -> list[str]:
    """Number equal identities, so that a duplicate row is a second job."""
    counts: Counter[str] = Counter()
    distinct = []
    for name in identities:
        counts[name] += 1
        distinct.append(f"{name}-{counts[name]}" if counts[name] > 1 else name)
    return distinct


def _code(name: str) -> str | None:
    """Return a digest of the files that define `name`, found without an import."""
    parts = name.split(".")
    for folder in dict.fromkeys([Path.cwd(), *map(Path, sys.path)]):
        for length in range(len(parts), 0, -1):
            inner = folder.joinpath(*parts[:length])
            for file in filter(Path.is_file, (inner.with_suffix(".py"), inner / "__init__.py")):
                package = folder / parts[0]
                whole = folder == Path.cwd() and package.is_dir()
                files = sorted(package.rglob("*.py")) if whole else [file]
                code = (each.read_bytes() for each in files if each.is_file())
                return hashlib.sha256(b"\0".join(code)).hexdigest()
    return None
