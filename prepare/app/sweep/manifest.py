"""The manifest of a sweep, `sweep.json` in its folder: its rows, and what makes two of them the same."""

from __future__ import annotations

import hashlib
import json
import math
import platform
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar

from prepare.app.job.record import LOCKS, Job
from prepare.app.sweep.locks import SUFFIX, is_held
from prepare.core.utils.json_records import JsonRecord, Kind
from prepare.core.utils.machine import driver
from prepare.core.utils.packages import version_of
from prepare.errors import FileError

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
        rows: the overrides of each row; None if they are not known.
        identities: `identity_of` each row; None for a row whose result depends on what
            only the job itself knows.
        host: the machine that the sweep was started on; empty if it is not known.
    """

    KIND: ClassVar[Kind] = Kind(
        "prepare.sweep", 1, "a list of the rows of a sweep", "the sweep.json of a sweep", FileError
    )
    sweep: str
    rows: list[list[str]] | None
    identities: list[str | None] = field(default_factory=list)
    host: str = field(default_factory=platform.node)

    def check(self) -> None:
        """Raise ValueError for a sweep without a name."""
        if not self.sweep:
            raise ValueError("the sweep has no name")

    def identity(self, number: int | None) -> str | None:
        """Return the identity of a row, if it has one."""
        if number is None or number >= len(self.identities):
            return None
        return self.identities[number]

    def number(self, job: Job) -> int | None:
        """Return the row of a job; None for a job of another sweep, or of a row that was removed."""
        if job.sweep != self.sweep:
            return None
        if job.identity is None:
            last = math.inf if self.rows is None else len(self.rows) - 1
            return job.number if job.number is not None and 0 <= job.number <= last else None
        return self.identities.index(job.identity) if job.identity in self.identities else None


def write_sweep_manifest(folder: Path, manifest: SweepManifest) -> None:
    """Write the rows that a sweep shall have, so that a missing one can be named. Raises FileError."""
    manifest.save(folder / "sweep.json")


def read_sweep_manifest(folder: Path) -> SweepManifest | None:
    """Read the manifest of the sweep in `folder`; None if there is no sweep. Raises FileError."""
    path = folder / "sweep.json"
    return SweepManifest.load(path) if path.is_file() else None


def manifest_claim(folder: Path) -> Path:
    """Return the claim of the process that decides which rows the sweep in `folder` has."""
    return folder / LOCKS / "manifest"


def leaders(folder: Path) -> Path:
    """Return the folder of the claims of all command lines that lead the sweep in `folder`."""
    return folder / LOCKS / "leaders"


def names_in(folder: Path) -> list[Path]:
    """Return the names in a folder that are claimed, or were when their process died."""
    with suppress(OSError):
        return sorted(file.with_suffix("") for file in folder.iterdir() if file.suffix == SUFFIX)
    return []


def is_led(folder: Path) -> bool:
    """Return True if a command line leads the sweep in `folder`."""
    return any(map(is_held, names_in(leaders(folder))))


def job_claim(folder: Path, identity: str) -> Path:
    """Return the claim of the process that executes this job."""
    return folder / LOCKS / identity


def is_running(folder: Path, identity: str | None) -> bool:
    """Return True if a process is executing this job; False also for a job without identity."""
    return identity is not None and is_held(job_claim(folder, identity))


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
    facts = {
        "config": {key: value for key, value in config.items() if key not in _WITHOUT_EFFECT},
        "choices": dict(choices),
        "versions": {name: version_of(name) for name in sorted(packages)},
        "driver": driver(),
        "code": {name: _code(name) for name in sorted({*_targets(config)})},
    }
    text = json.dumps(facts, sort_keys=True, default=repr)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:_LENGTH]


def number_duplicates(identities: Iterable[str | None]) -> list[str | None]:
    """Number equal identities, so that a duplicate row is a second job."""
    counts: Counter[str | None] = Counter()
    distinct = []
    for name in identities:
        counts[name] += 1
        distinct.append(f"{name}-{counts[name]}" if name is not None and counts[name] > 1 else name)
    return distinct


def _targets(config: Any) -> Iterator[str]:
    """Yield the dotted names that a configuration imports."""
    if isinstance(config, Mapping):
        if isinstance(target := config.get("_target_"), str):
            yield target
        yield from (name for name in config.get("plugins") or () if isinstance(name, str))
        config = config.values()
    elif not isinstance(config, list):
        return
    for value in config:
        yield from _targets(value)


def _code(name: str) -> str | None:
    """Return a digest of the files that define `name`, found without an import."""
    parts = name.split(".")
    for folder in dict.fromkeys([Path.cwd(), *map(Path, sys.path)]):
        for length in range(len(parts), 0, -1):
            inner = folder.joinpath(*parts[:length])
            for file in (inner.with_suffix(".py"), inner / "__init__.py"):
                if file.is_file():
                    package = folder / parts[0]
                    whole = folder == Path.cwd() and package.is_dir()
                    return _digest(sorted(package.rglob("*.py")) if whole else [file])
    return None


def _digest(files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        with suppress(OSError):
            digest.update(file.read_bytes())
    return digest.hexdigest()
