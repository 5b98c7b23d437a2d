"""The results of one job: what it knows of its model, and the files of its record that hold it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from prepare.app.job.figures import CONVOLUTIONS
from prepare.app.job.record import NOTHING_CHANGED, Job, Record, Result
from prepare.audit import Audit
from prepare.core.utils import files, json_records
from prepare.core.utils.machine import check_environment, environment
from prepare.errors import FileError, PrepareError, Problem
from prepare.stages.stage import ordered_stages

if TYPE_CHECKING:
    from prepare.pipeline import Pipeline

_PLAN = json_records.Kind("prepare.plan", 1, "a plan", "a plan.json", FileError)
_PLAN_TYPES = {
    "steps": dict[str, dict[str, Any]],
    **dict.fromkeys(("problems", "warnings", "training_errors"), list[Problem]),
    "training_steps": dict[str, dict[str, Any]] | None,
}
_SUMMARY_TYPES = {
    **dict.fromkeys(("tensors", "to_change", "bytes_before", "bytes_after", "bytes_written"), int),
    "by_step": dict[str, int],
}
_ENVIRONMENT = json_records.Kind(
    "prepare.environment", 1, "an environment", "an environment.json", FileError
)
_T = TypeVar("_T")


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
    """A run as far as it is known: by the job itself, or from its record, without torch.

    Attributes:
        name: the name of its folder.
        model: the class of the model, and its method.
        overrides: the words of the command line.
        steps: the steps of its pipeline, with their options.
        plan: the content of `plan.json`.
        seen: the forward of the example input, as in `job.json`.
        has_example: whether the model was called, as far as that is known.
        formats: whether the user has to format a batch, as it is not the model that does.
        unchanged: whether neither the model nor its example is changed, so that nothing is verified or timed.
        stopped: what is missing, if the job was interrupted after the model was prepared.
        amp: the autocast of every forward.
        problems: a line for each file that cannot be read; one that is missing is None.
    """

    name: str = ""
    model: str = "a model"
    task: str = ""
    overrides: tuple[str, ...] = ()
    steps: dict[str, Any] = field(default_factory=dict)
    plan: dict[str, Any] | None = None
    seen: dict[str, Any] | None = None
    has_example: bool = True
    formats: bool = False
    unchanged: bool = False
    stopped: str = ""
    amp: str = "none"
    notes: list[str] = field(default_factory=list)
    result: Result | None = None
    job: Job | None = None
    recipe: str | None = None
    environment: dict[str, Any] | None = None
    problems: tuple[str, ...] = ()


# Called with the results so far.
Show = Callable[[Results], None]


def write_record(record: Record, job: Job, results: Results, pipeline: Pipeline) -> None:
    """Write every file of the record, except its pages and its result. Raises FileError."""
    record.write_plan(results.plan or {})
    if results.audit is not None:
        record.write_prepared(pipeline, results.audit)
    for file in record_classes():
        if (found := results.found.get(Path(file).stem)) is not None:
            found.save(record.folder / file)
    record.write_environment(environment())
    record.write_job(replace(job, seen=results.seen, model=results.model))


def read_results(folder: str | Path, result: Result | None = None) -> Results:
    """Read the record in `folder`; any file may be missing or unreadable. `result` is for one without it.

    Raises:
        FileError: the folder does not exist, or holds no file of a record.
    """
    folder = Path(folder)
    problems: list[str] = []
    record = Record(folder)
    readers: dict[str, tuple[str, Callable[[Path], Any]]] = {
        "result": ("result.json", lambda _: record.result()),
        "job": ("job.json", lambda _: record.job()),
        "recipe": ("recipe.yaml", lambda path: files.read_text(path, limit=json_records.LIMIT)),
        "plan": ("plan.json", lambda _: read_plan(folder)),
        "audit": ("audit.json", Audit.load),
        "environment": (
            "environment.json",
            lambda path: json_records.read_record(path, _ENVIRONMENT, check_environment),
        ),
    }
    parts: dict[str, Any] = {
        key: _read(folder / name, reader, problems) for key, (name, reader) in readers.items()
    }
    read = {
        Path(file).stem: _read(folder / file, cls.load, problems)
        for file, cls in record_classes().items()
    }
    found = {name: record for name, record in read.items() if record is not None}
    if not problems and not found and not any(value is not None for value in parts.values()):
        wrong = "is not the record of a run"
        raise FileError(
            files.printable_path(folder), wrong, "give the folder that a run has written"
        )
    parts["result"] = ended = parts["result"] or result
    job, plan = parts["job"], parts["plan"]
    stopped = ended is not None and ended.status == "interrupted"
    return Results(
        name=folder.resolve().name,
        model=_model_of(job),
        overrides=tuple(job.overrides) if job else (),
        steps=plan["steps"] if plan else {},
        has_example=job is None or bool(job.seen),
        unchanged=ended is not None and ended.reason == NOTHING_CHANGED,
        stopped=(ended.error or ended.status) if ended and stopped else "",
        amp=ended.amp if ended else "none",
        notes=ended.notes if ended else [],
        problems=tuple(problems),
        found=found,
        **parts,
    )


def _model_of(job: Job | None) -> str:
    """Return the class of the model and its method; of a job that failed the option or `_target_`."""
    if job is None or job.model:
        return job.model if job else "a model"
    option = job.choices.get("model")
    if option and option != "custom":
        return str(option)
    targets = (text.partition("=")[2] for text in job.overrides if "model._target_=" in text)
    return next(targets, "") or "a model"


def record_classes() -> dict[str, Any]:
    """Return the class of the record in each file that a stage writes, in the order of the stages."""
    return {file: cls for stage in ordered_stages() for file, cls in stage.records().items()}


def read_plan(folder: Path) -> dict[str, Any]:
    """Read the plan in the folder of a record. Raises FileError."""
    return json_records.read_record(folder / "plan.json", _PLAN, _checked)


def _checked(plan: dict[str, Any]) -> dict[str, Any]:
    json_records.check_values(plan, _PLAN_TYPES)
    json_records.check_values(plan["summary"], _SUMMARY_TYPES)
    return plan


def _read(path: Path, reader: Callable[[Path], _T], problems: list[str]) -> _T | None:
    if not path.is_file():
        return None
    try:
        return reader(path)
    except PrepareError as error:
        # Without the folder: the page shall have the same bytes wherever the folder is copied to.
        problem = error.problems[0]
        problems.append(f"{path.name}: {problem.wrong}")
        return None
