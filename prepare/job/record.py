"""The folder one run leaves behind: every file of it is written and read here, and nowhere else."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prepare.core.utils import files, json_records
from prepare.errors import FileError

if TYPE_CHECKING:
    from prepare.audit import Audit
    from prepare.pipeline import Pipeline
    from prepare.plan import Plan

STATUSES = (
    *("ok", "no_effect", "skipped", "interrupted"),
    *("verification_failed", "failed", "crashed"),
)
# What a sweep that is taken up again leaves as it is: to do it again would give the same.
KEPT = ("ok", "no_effect", "verification_failed")
# Everything a run may leave; what an earlier run left in the same folder is removed first.
FILES = (
    *("recipe.yaml", "plan.json", "audit.json", "audit.csv"),
    *("flow.json", "flow_before.json", "flow.svg", "verify.json"),
    *("bench.json", "bench.svg", "tune.json", "tune.svg", "report.html"),
    *("environment.json", "job.json", "log.txt", "result.json"),
)
_RESULT, _JOB = "prepare.result", "prepare.job"
_VERSION = 1
# More than any of these files needs; a summary reads what stands in the folders of others.
_LIMIT = 1 << 24


@dataclass(frozen=True)
class Result:
    """How a run ended. `reason` is a word (`oom`, `model`), `error` says what happened in a line."""

    status: str
    reason: str | None = None
    error: str | None = None
    traceback: str | None = None
    seconds: float = 0.0


@dataclass(frozen=True)
class Job:
    """What a run was asked: its number in a sweep, its overrides, the options chosen in each group.

    `sweep` tells the rows of one sweep from what an older one left in the same folder, and `identity`
    one job of it from another. `shared` says that its launcher runs several on one machine at a time.
    `seen` is what the example forward showed, once there was one.
    """

    number: int | None
    sweep: str | None
    overrides: list[str]
    choices: dict[str, Any]
    identity: str | None = None
    launcher: str | None = None
    shared: bool = False
    seen: dict[str, Any] | None = None


class Record:
    """One run's folder."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def clear(self) -> None:
        """Makes the folder, and removes what an earlier run may have left in it."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            # The result first: what has one is complete.
            for name in reversed(FILES):
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
        """What was asked, in `job.json`."""
        self._write("job.json", {"format": _JOB, "version": _VERSION, **asdict(job)})

    def write_environment(self, environment: Mapping[str, Any]) -> None:
        """Where it ran, in `environment.json`."""
        self._write("environment.json", environment)

    def write_plan(self, plan: Plan) -> None:
        """What was to be done, in `plan.json`."""
        json_records.write_json(self.folder / "plan.json", plan.to_dict(), lines=True)

    def write_prepared(self, pipeline: Pipeline, audit: Audit) -> None:
        """The recipe and the audit; the same bytes for the same model and recipe."""
        pipeline.save(self.folder / "recipe.yaml")
        audit.save(self.folder / "audit.json")
        audit.save(self.folder / "audit.csv")

    def write_result(self, result: Result) -> None:
        """How it ended, in `result.json`: the last file to be written."""
        self._write("result.json", {"format": _RESULT, "version": _VERSION, **asdict(result)})

    def result(self) -> Result | None:
        """How it ended; None where the run has not come so far."""
        data = _read(self.folder / "result.json", _RESULT)
        return data and Result(**data)

    def job(self) -> Job | None:
        """What was asked; None where nothing was written."""
        data = _read(self.folder / "job.json", _JOB)
        return data and Job(**data)

    def is_of(self, job: Job) -> bool:
        """Whether it was this job that ran here."""
        found = self.job()
        return found is not None and (found.sweep, found.identity) == (job.sweep, job.identity)

    def remove(self) -> None:
        """Removes what a run has left, and its folder where nothing else is in it."""
        self.clear()
        with contextlib.suppress(OSError):
            self.folder.rmdir()

    def _write(self, name: str, data: Any) -> None:
        json_records.write_json(self.folder / name, data)


def _read(path: Path, kind: str) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    with contextlib.suppress(ValueError, AttributeError, TypeError, RecursionError):
        data = json.loads(files.read_text(path, limit=_LIMIT))
        if data.pop("format", None) == kind and data.pop("version", None) == _VERSION:
            known = (Result if kind == _RESULT else Job).__dataclass_fields__
            if data.keys() == set(known):
                return data
    raise FileError(files.printable_path(path), f"is no {kind} of version {_VERSION}", "")


def unusable(folder: str | Path, error: OSError, key: str = "hydra.run.dir") -> FileError:
    """The error of a folder that cannot be made; `key` is where another is chosen."""
    remedy = files.REMEDIES.get(error.errno or 0, f"choose another with {key}=FOLDER")
    return FileError(files.printable_path(folder), f"cannot be used: {error.strerror}", remedy)
