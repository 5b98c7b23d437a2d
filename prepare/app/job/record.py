"""The record of a run: the folder that it writes, and its files about the job and its result."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from prepare.app.job.figures import check_figures
from prepare.core.utils import files, json_records
from prepare.core.utils.json_records import JsonRecord, Kind
from prepare.errors import FileError, Problem
from prepare.stages.stage import ordered_stages

if TYPE_CHECKING:
    from prepare.audit import Audit
    from prepare.pipeline import Pipeline

STATUSES = (
    *("ok", "no_effect", "skipped", "interrupted"),
    *("verification_failed", "failed", "crashed"),
)
# The `reason` of a job that ended well, and changed neither its model nor its example.
NOTHING_CHANGED = "nothing changed"
# A resumed sweep does not repeat jobs of these statuses: the result would be the same.
KEPT = ("ok", "no_effect", "verification_failed")
# The files of a record beside those of its stages.
_FIRST = ("recipe.yaml", "plan.json", "audit.json", "audit.csv")
_LAST = (
    *("report.html", "environment.json", "job.json", "log.txt", "traceback.txt", "result.json"),
)
# What Hydra leaves beside a record.
_HYDRA = ".hydra"
_KILLED = "holds no result: its run was killed or is still running"
# Of fields that the files of earlier versions do not have.
_LATE = {"late": True}
# More than any of these files needs; a summary also reads folders that others have written.
_LIMIT = 1 << 24


@dataclass(frozen=True)
class Result(JsonRecord):
    """The end of a job.

    `reason` is a word or two (`oom`, `nothing changed`), `error` says in a line what happened. `figures` are
    those of `prepare.app.job.results`; None if the job did not come to its end. `problems` are the mistakes
    that `error` names, `place` the line of the user's code that raised.
    If it failed, `done` are the stages that it completed, and `during` the stage in which it failed. `amp` is
    the autocast of every forward. `notes` are the sentences on the run that no stage keeps in its record.
    """

    KIND: ClassVar[Kind] = Kind(
        "prepare.result", 1, "the result of a job", "the result.json of a run", FileError
    )
    LIMIT: ClassVar[int] = _LIMIT
    status: str
    reason: str | None = None
    error: str | None = None
    traceback: str | None = None
    seconds: float = 0.0
    figures: dict[str, Any] | None = field(default=None, metadata=_LATE)
    done: list[str] = field(default_factory=list, metadata=_LATE)
    during: str = field(default="", metadata=_LATE)
    amp: str = field(default="none", metadata=_LATE)
    notes: list[str] = field(default_factory=list, metadata=_LATE)
    problems: list[Problem] = field(default_factory=list, metadata=_LATE)
    place: str = field(default="", metadata=_LATE)

    def check(self) -> None:
        """Raise ValueError for a status that no job has, or figures of other kinds."""
        if self.status not in STATUSES:
            raise ValueError(f"{self.status!r} is not a status")
        check_figures(self.figures)


@dataclass(frozen=True)
class Job(JsonRecord):
    """A job as its record describes it: number in a sweep, overrides, option chosen in each group.

    `sweep` distinguishes a sweep from an older one in the same folder, and `identity` one of its jobs
    from another. `shared`: its launcher runs several jobs at a time on one machine. `seen` describes
    the forward of the example input, if it ran. `model` is the class of the model, and the method that a
    call of it runs, `AutoencoderKL.decode`.
    """

    KIND: ClassVar[Kind] = Kind("prepare.job", 1, "a job", "the job.json of a run", FileError)
    LIMIT: ClassVar[int] = _LIMIT
    number: int | None
    sweep: str | None
    overrides: list[str]
    choices: dict[str, Any]
    identity: str | None = None
    launcher: str | None = None
    shared: bool = False
    seen: dict[str, Any] | None = None
    model: str = field(default="", metadata=_LATE)


def files_in() -> tuple[str, ...]:
    """Return the names of all files that a job may leave in its folder, the result last."""
    found = (name for cls in ordered_stages() for name in cls.records())
    return (*_FIRST, *dict.fromkeys(found), *_LAST)


def shown_files() -> tuple[str, ...]:
    """Return the names of the files that a user may look for, in the order in which they are written."""
    records = (name for cls in ordered_stages() for name in cls.records())
    return (*_FIRST, *records, "report.html", "environment.json", "job.json", "result.json")


class Record:
    """The folder of one job."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def clear(self) -> None:
        """Make the folder, and remove the files of an earlier job in it. Raises FileError."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            # The result first: a record that has one is complete.
            for name in reversed(files_in()):
                (self.folder / name).unlink(missing_ok=True)
            for left_by_a_kill in self.folder.glob(f".*{files.TEMPORARY}"):
                left_by_a_kill.unlink(missing_ok=True)
        except OSError as error:
            raise unusable(self.folder, error) from error

    def begin(self, job: Job) -> None:
        """Clear the folder for a job; `job.json` identifies a job of a sweep. Raises FileError."""
        self.clear()
        if job.sweep is not None:
            self.write_job(job)

    def write_job(self, job: Job) -> None:
        """Write `job.json`."""
        self._write("job.json", job.KIND.head | job.content())

    def write_environment(self, environment: dict[str, Any]) -> None:
        """Write `environment.json`: packages and devices."""
        self._write("environment.json", environment)

    def write_plan(self, plan: dict[str, Any]) -> None:
        """Write `plan.json`, the content of a plan."""
        json_records.write_json(self.folder / "plan.json", plan, lines=True)

    def write_prepared(self, pipeline: Pipeline, audit: Audit) -> None:
        """Write the recipe and the audit; the same bytes for the same model and recipe."""
        # Not `save`, which warns of what is left out: the notes of a run say it.
        from prepare import recipe

        recipe.save(self.folder / "recipe.yaml", pipeline.to_recipe())
        audit.save(self.folder / "audit.json")
        audit.save(self.folder / "audit.csv")

    def write_result(self, result: Result) -> None:
        """Write `result.json`, the last file of a record, and before it the traceback of an error."""
        if result.status == "failed" and result.traceback:
            files.write_text(self.folder / "traceback.txt", result.traceback)
        self._write("result.json", result.KIND.head | result.content())

    def result(self) -> Result | None:
        """Read the result; None if the job has not ended. Raises FileError."""
        path = self.folder / "result.json"
        return Result.load(path) if path.is_file() else None

    def job(self) -> Job | None:
        """Read the job; None if nothing was written. Raises FileError."""
        path = self.folder / "job.json"
        return Job.load(path) if path.is_file() else None

    def is_of(self, job: Job) -> bool:
        """Return whether the record is that of `job`. Raises FileError."""
        own = self.job()
        return own is not None and (own.sweep, own.identity) == (job.sweep, job.identity)

    def _write(self, name: str, data: Any) -> None:
        json_records.write_json(self.folder / name, data)


def used_folder(folder: Path) -> list[Problem]:
    """Return the problem of a folder that holds files which a run would replace."""
    # Not `Path.exists`, which raises if the name is too long.
    found = [name for name in (*files_in(), _HYDRA) if os.path.lexists(folder / name)]
    if not found:
        return []
    wrong = _KILLED if without_result(folder) else f"holds {found[0]} already"
    remedy = "choose another folder, or add overwrite=true"
    return [Problem("hydra.run.dir", f"the folder {wrong}", remedy)]


def without_result(folder: Path) -> FileError | None:
    """Return the error of the folder of a single run that wrote no result; None for other folders."""
    other = (folder / name for name in ("result.json", "sweep.json"))
    if not files.is_folder(folder / _HYDRA) or any(map(os.path.lexists, other)):
        return None
    remedy = "wait for it, or run it again; on Linux, dmesg says if memory ran out"
    return FileError(files.printable_path(folder), _KILLED, remedy)


def unusable(folder: str | Path, error: OSError, key: str = "hydra.run.dir") -> FileError:
    """Return the error of a folder that cannot be made; `key` is the option that names another."""
    remedy = files.REMEDIES.get(error.errno or 0, f"choose another with {key}=FOLDER")
    return FileError(files.printable_path(folder), f"cannot be used: {error.strerror}", remedy)
