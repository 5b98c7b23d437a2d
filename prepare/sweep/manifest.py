"""The manifest of a sweep, `sweep.json` in its folder: its rows, their identities and its host."""

from __future__ import annotations

import math
import platform
from dataclasses import asdict, dataclass, field
from pathlib import Path

from prepare.core.utils import json_records
from prepare.errors import FileError
from prepare.job.record import LOCKS, Job, unusable
from prepare.sweep.locks import is_held, names_in

_KIND = json_records.Kind(
    "prepare.sweep", 1, "a list of the rows of a sweep", "the sweep.json of a sweep", FileError
)


@dataclass(frozen=True, slots=True)
class SweepManifest:
    """The rows that a sweep shall have.

    Attributes:
        sweep: the name of the sweep.
        rows: the overrides of each row; None if they are not known.
        identities: `prepare.sweep.identity` of each row; None for a row whose result depends on what
            only the job itself knows.
        host: the machine that the sweep was started on; empty if it is not known.
    """

    sweep: str
    rows: list[list[str]] | None
    identities: list[str | None] = field(default_factory=list)
    host: str = field(default_factory=platform.node)

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
    make_folder(folder)
    json_records.write_json(folder / "sweep.json", _KIND.head | asdict(manifest), lines=True)


def make_folder(folder: Path) -> None:
    """Make the folder of a sweep. Raises FileError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unusable(folder, error, "hydra.sweep.dir") from error


def read_sweep_manifest(folder: Path) -> SweepManifest | None:
    """Read the manifest of the sweep in `folder`; None if there is no sweep. Raises FileError."""
    path = folder / "sweep.json"
    return json_records.load(SweepManifest, path, _KIND, check=_check) if path.is_file() else None


def _check(manifest: SweepManifest) -> None:
    if not manifest.sweep:
        raise ValueError("the sweep has no name")


def manifest_claim(folder: Path) -> Path:
    """Return the claim of the process that decides which rows the sweep in `folder` has."""
    return folder / LOCKS / "manifest"


def leaders(folder: Path) -> Path:
    """Return the folder of the claims of all command lines that lead the sweep in `folder`."""
    return folder / LOCKS / "leaders"


def is_led(folder: Path) -> bool:
    """Return True if a command line leads the sweep in `folder`."""
    return any(map(is_held, names_in(leaders(folder))))


def job_claim(folder: Path, identity: str) -> Path:
    """Return the claim of the process that executes this job."""
    return folder / LOCKS / identity


def is_running(folder: Path, identity: str | None) -> bool:
    """Return True if a process is executing this job; False also for a job without identity."""
    return identity is not None and is_held(job_claim(folder, identity))
