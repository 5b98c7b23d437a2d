"""What a sweep is to do, in its folder's `sweep.json`: its rows, what tells them apart, who is at work."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict, dataclass, field
from pathlib import Path

from prepare.core.utils import files, json_records
from prepare.errors import FileError
from prepare.job.record import Job, unusable
from prepare.sweep.locks import held

_FORMAT, _VERSION = "prepare.sweep", 1
# In the folder of the sweep; what is in it is locked, and never read.
_LOCKS = ".locks"


@dataclass(frozen=True, slots=True)
class Planned:
    """`sweep` is the name of the sweep; `rows` are the overrides of each, None where they are not known.

    `identities` say of each row what determines its result (`prepare.sweep.identity`), None where that cannot
    be told before it runs. `host` is the machine that the sweep was started on, and empty where nobody
    can tell whether it goes on.
    """

    sweep: str
    rows: list[list[str]] | None
    identities: list[str | None] = field(default_factory=list)
    host: str = field(default_factory=platform.node)

    def identity(self, number: int | None) -> str | None:
        """What determines the result of a row."""
        known = number is not None and number < len(self.identities)
        return self.identities[number] if known else None

    def number(self, job: Job) -> int | None:
        """The row that a job is of; None for one of another sweep, and of rows that are no longer planned."""
        if job.sweep != self.sweep:
            return None
        if job.identity is None:
            return job.number
        return self.identities.index(job.identity) if job.identity in self.identities else None


def write_planned(folder: Path, planned: Planned) -> None:
    """Notes which rows a sweep is to have, so that a missing one can be told. Raises FileError."""
    make_folder(folder)
    data = {"format": _FORMAT, "version": _VERSION, **asdict(planned)}
    json_records.write_json(folder / "sweep.json", data, lines=True)


def make_folder(folder: Path) -> None:
    """Makes the folder of a sweep. Raises FileError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unusable(folder, error, "hydra.sweep.dir") from error


def read_planned(folder: Path) -> Planned | None:
    """What the sweep in `folder` is to do; None where there is none. Raises FileError."""
    path = folder / "sweep.json"
    if not path.is_file():
        return None
    try:
        data = json.loads(files.read_text(path, limit=1 << 28))
        if data.pop("format") == _FORMAT and data.pop("version") == _VERSION and data["sweep"]:
            return Planned(**data)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass
    raise FileError(files.printable_path(path), "is no list of a sweep's rows", "remove it")


def sweep_lock(folder: Path) -> Path:
    """The lock that every command line which runs the sweep in `folder` shares."""
    return folder / _LOCKS / "sweep"


def job_lock(folder: Path, identity: str) -> Path:
    """The lock of the process that does this job."""
    return folder / _LOCKS / identity


def is_running(folder: Path, identity: str | None) -> bool:
    """Whether a process is doing this job now; of one without identity it is not known, and False."""
    return identity is not None and held(job_lock(folder, identity))
