"""The record of a run: what it knows of its model, its figures, and the folder with its files."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from prepare.audit import Audit
from prepare.core.utils import files, json_records
from prepare.core.utils.json_records import JsonRecord, Kind, read_record
from prepare.errors import FileError, Problem
from prepare.stages.stage import ordered_stages

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
# The statuses of convolutions that tables count.
CONVOLUTIONS = ("converted", "already", "skipped", "ineffective")
_ENVIRONMENT = Kind("prepare.environment", "an environment", "an environment.json")
# What Hydra leaves beside a record.
_HYDRA = ".hydra"
_KILLED = "holds no result: its run was killed or is still running"


@dataclass(frozen=True)
class Result(JsonRecord):
    """The end of a job.

    `reason` is a word or two (`oom`, `nothing changed`), `error` says in a line what happened. `figures` are
    those of `Analyses`; None if the job did not come to its end. `problems` are the mistakes
    that `error` names, `place` the line of the user's code that raised.
    If it failed, `done` are the stages that it completed, and `during` the stage in which it failed. `amp` is
    the autocast of every forward. `notes` are the sentences on the run that no stage keeps in its record.
    """

    KIND: ClassVar[Kind] = Kind("prepare.result", "the result of a job", "the result.json of a run")
    status: str
    reason: str | None = None
    error: str | None = None
    traceback: str | None = None
    seconds: float = 0.0
    figures: dict[str, Any] | None = None
    done: list[str] = field(default_factory=list)
    during: str = ""
    amp: str = "none"
    notes: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    place: str = ""

    def check(self) -> None:
        """Raise ValueError for a status that no job has."""
        if self.status not in STATUSES:
            raise ValueError(f"{self.status!r} is not a status")


@dataclass(frozen=True)
class Job(JsonRecord):
    """A job as its record describes it: number in a sweep, overrides, option chosen in each group.

    `sweep` distinguishes a sweep from an older one in the same folder, and `identity` one of its jobs
    from another. `shared`: its launcher runs several jobs at a time on one machine. `seen` describes
    the forward of the example input, if it ran. `model` is the class of the model, and the method that a
    call of it runs, `AutoencoderKL.decode`.
    """

    KIND: ClassVar[Kind] = Kind("prepare.job", "a job", "the job.json of a run")
    number: int | None
    sweep: str | None
    overrides: list[str]
    choices: dict[str, Any]
    identity: str | None = None
    launcher: str | None = None
    shared: bool = False
    seen: dict[str, Any] | None = None
    model: str = ""


def files_in() -> tuple[str, ...]:
    """Return the names of all files that a job may leave in its folder, the result last."""
    found = (name for cls in ordered_stages() for name in cls.records())
    return (*_FIRST, *dict.fromkeys(found), *_LAST)


def shown_files() -> tuple[str, ...]:
    """Return the names of the files that a user may look for, in the order in which they are written."""
    records = (name for cls in ordered_stages() for name in cls.records())
    return (*_FIRST, *records, "report.html", "environment.json", "job.json", "result.json")


@dataclass(frozen=True, kw_only=True)
class Analyses:
    """The audit of one model, and the records of the stages that ran, by name."""

    audit: Audit | None = None
    found: dict[str, Any] = field(default_factory=dict)

    def figures(self) -> dict[str, Any]:
        """Return the figures of the audit and of each stage that ran; one that did not run has no key.

        Sizes are bytes, times seconds, and `time_ratio` is the time of the prepared model relative to that
        of the unprepared one: below 1 is faster. `prepared_seconds` is that ratio times
        `unprepared_seconds`.
        """
        figures: dict[str, Any] = {}
        if self.audit is not None:
            summary = self.audit.summary
            counts = summary["convolutions"]
            figures |= {f"convolutions_{w}": counts.get(w, 0) for w in (*CONVOLUTIONS, "untouched")}
            figures |= {key: summary[key] for key in ("tensors", "bytes_before", "bytes_after")}
            operations = [row.operation for row in self.audit.rows if row.operation]
            if rewritten := sum(not name.startswith("conv") for name in operations):
                figures["convolutions_rewritten"] = rewritten
        for cls in ordered_stages():
            figures |= cls.figures(self.found)
        return figures


@dataclass(frozen=True, kw_only=True)
class Results(Analyses):
    """A run as far as it is known; `job` has its words, its model and the forward of its example.

    Attributes:
        task: the word of `task=`; empty for a report on a model, which no command line has made.
        steps: the steps of its pipeline, with their options.
        plan: the content of `plan.json`.
        recipe: the text of `recipe.yaml`; None if there is none.
        environment: the content of `environment.json`.
        formats: whether the user has to format a batch, as it is not the model that does.
        unchanged: whether neither the model nor its example is changed, so that nothing is verified or timed.
        stopped: what is missing, if the job was interrupted after the model was prepared.
        amp: the autocast of every forward.
        notes: the sentences on the run that no stage keeps in its record.
        result: how it ended; None until then.
    """

    job: Job
    task: str = "prepare"
    steps: dict[str, Any] = field(default_factory=dict)
    plan: dict[str, Any] | None = None
    recipe: str | None = None
    environment: dict[str, Any] | None = None
    formats: bool = False
    unchanged: bool = False
    stopped: str = ""
    amp: str = "none"
    notes: list[str] = field(default_factory=list)
    result: Result | None = None

    @property
    def model(self) -> str:
        """The class of the model and its method; of a job that failed the option or `_target_`."""
        option = self.job.choices.get("model")
        targets = (w.partition("=")[2] for w in self.job.overrides if "model._target_=" in w)
        named = option if option != "custom" else None
        return self.job.model or str(named or next(targets, "") or "a model")

    @property
    def is_training(self) -> bool:
        """True if the model is used in training mode."""
        modes = {getattr(record, "mode", "") for record in self.found.values()}
        return "train" in modes or "mode=train" in self.job.overrides


class Record:
    """The folder of one job."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def begin(self, job: Job) -> None:
        """Make the folder, and remove the files of an earlier job; `job.json` names a job of a sweep.

        Raises:
            FileError: the folder cannot be used.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            # The result first: a record that has one is complete.
            for name in reversed(files_in()):
                (self.folder / name).unlink(missing_ok=True)
            for left_by_a_kill in self.folder.glob(f".*{files.TEMPORARY}"):
                left_by_a_kill.unlink(missing_ok=True)
        except OSError as error:
            raise unusable(self.folder, error) from error
        if job.sweep is not None:
            self.write_job(job)

    def write_job(self, job: Job) -> None:
        """Write `job.json`."""
        job.save(self.folder / "job.json")

    def write_environment(self, environment: dict[str, Any]) -> None:
        """Write `environment.json`: packages and devices."""
        json_records.write_json(self.folder / "environment.json", environment)

    def write_results(self, results: Results) -> None:
        """Write every file but the page and the result; the same bytes for the same model and recipe."""
        json_records.write_json(self.folder / "plan.json", results.plan or {})
        if results.recipe is not None:
            files.write_text(self.folder / "recipe.yaml", results.recipe)
        if results.audit is not None:
            results.audit.save(self.folder / "audit.json")
            results.audit.save(self.folder / "audit.csv")
        for name in record_classes():
            if (found := results.found.get(Path(name).stem)) is not None:
                found.save(self.folder / name)
        self.write_environment(results.environment or {})
        self.write_job(results.job)

    def write_result(self, result: Result) -> None:
        """Write `result.json`, the last file of a record, and before it the traceback of an error."""
        if result.status == "failed" and result.traceback:
            files.write_text(self.folder / "traceback.txt", result.traceback)
        result.save(self.folder / "result.json")

    def result(self) -> Result | None:
        """Read the result; None if the job has not ended. Raises FileError."""
        return _read(self.folder / "result.json", Result.load)

    def job(self) -> Job | None:
        """Read the job; None if nothing was written. Raises FileError."""
        return _read(self.folder / "job.json", Job.load)

    def is_of(self, job: Job) -> bool:
        """Return whether the record is that of `job`. Raises FileError."""
        own = self.job()
        return own is not None and (own.sweep, own.identity) == (job.sweep, job.identity)


def _read(path: Path, reader: Callable[[Path], Any]) -> Any:
    return reader(path) if path.is_file() else None


def record_classes() -> dict[str, Any]:
    """Return the class of the record in each file that a stage writes, in the order of the stages."""
    return {file: cls for stage in ordered_stages() for file, cls in stage.records().items()}


def read_results(folder: Path) -> Results:
    """Read what two runs are compared by: the job, its result, recipe, environment and audit, if they exist.

    Raises:
        FileError: there is none of these files, or one cannot be read.
    """
    record, limit = Record(folder), json_records.LIMIT
    job, of_environment = record.job(), folder / "environment.json"
    found = {
        "result": record.result(),
        "recipe": _read(folder / "recipe.yaml", lambda p: files.read_text(p, limit=limit)),
        "audit": _read(folder / "audit.json", Audit.load),
        "environment": _read(of_environment, lambda p: read_record(p, _ENVIRONMENT, dict)),
    }
    if job is None and not any(value is not None for value in found.values()):
        wrong, remedy = "is not the record of a run", "give the folder that a run has written"
        raise FileError(files.printable_path(folder), wrong, remedy)
    return Results(job=job or Job(None, None, [], {}), **found)


def interval_of(figures: Mapping[str, Any]) -> tuple[float, float] | None:
    """Return the 95 % interval of the time ratio, if there is one."""
    low, high = figures.get("time_ratio_low"), figures.get("time_ratio_high")
    return None if low is None or high is None else (low, high)


def overlap(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    """Return whether the intervals of two time ratios overlap; false if one is missing."""
    ours, theirs = interval_of(first), interval_of(second)
    return bool(ours and theirs and ours[0] <= theirs[1] and theirs[0] <= ours[1])


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
