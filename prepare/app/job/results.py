"""The results of one job: as the job makes them, and as they are read back from its record without torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from prepare.app.job.headline import CONVOLUTIONS
from prepare.app.job.record import NOTHING_CHANGED, Job, Record, Result
from prepare.audit import Audit
from prepare.core.utils import files, json_records
from prepare.core.utils.machine import check_environment
from prepare.errors import FileError, PrepareError
from prepare.stages.registry import ordered_stages

if TYPE_CHECKING:
    from prepare.core.forward.run_example import LayoutCount
    from prepare.pipeline import Pipeline
    from prepare.pipeline.plan import Plan

_PLAN = json_records.Kind("prepare.plan", 1, "a plan", "a plan.json", FileError)
_PLAN_TYPES = {
    "steps": dict[str, dict[str, Any]],
    **dict.fromkeys(("problems", "warnings"), list[str]),
    "training_errors": list[str] | None,
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


@dataclass(frozen=True)
class ExampleRun:
    """The forward of the example input: its inputs and outputs in words, and the layouts of convolutions."""

    inputs: str
    outputs: str
    convolutions: list[LayoutCount]


@dataclass(frozen=True, kw_only=True)
class Results(Analyses):
    """The results of a job that came to its end, in the process that executed it.

    `model` is the name of the model's class; `notes` are shown in the terminal. `stopped`
    says what is missing if the job was interrupted after the model was prepared. `unchanged` says that the
    pipeline changes neither the model nor its example, so that nothing is verified or timed. `amp` is the
    autocast of every forward. `fail_on` are the words of what makes it a failure. `waiting` are the variables
    of the environment that decide how its threads wait.
    """

    model: str
    pipeline: Pipeline
    plan: Plan
    notes: list[str] = field(default_factory=list)
    example: ExampleRun | None = None
    stopped: str = ""
    unchanged: bool = False
    amp: str = "none"
    task: str = "prepare"
    overrides: tuple[str, ...] = ()
    fail_on: tuple[str, ...] = ()
    waiting: str = ""

    @property
    def is_stopped(self) -> bool:
        """Return whether the run was stopped after the model was prepared."""
        return bool(self.stopped)

    @property
    def has_problems(self) -> bool:
        """Return whether the plan has errors."""
        return bool(self.plan.errors)

    @property
    def troubles(self) -> list[str]:
        """Return the errors of the plan, then the warnings."""
        return [
            *(str(problem) for error in self.plan.errors for problem in error.problems),
            *map(str, self.plan.warnings),
        ]

    @property
    def has_example(self) -> bool:
        """Return whether the model was called."""
        return self.example is not None

    def write(self, record: Record, job: Job) -> None:
        """Write every file of the record, except its pages and its result. Raises FileError."""
        from prepare.core.utils.machine import environment

        record.write_plan(self.plan)
        if self.audit is not None:
            record.write_prepared(self.pipeline, self.audit)
        for file in record_classes():
            if (found := self.found.get(Path(file).stem)) is not None:
                found.save(record.folder / file)
        record.write_environment(environment())
        record.write_job(replace(job, seen=self.seen(), model=self.model))

    def seen(self) -> dict[str, Any] | None:
        """Return the example run as it is written to `job.json`."""
        if (run := self.example) is None:
            return None
        convolutions = [asdict(each) for each in run.convolutions]
        return {"given": run.inputs, "gave": run.outputs, "convolutions": convolutions}


# Called with the results so far.
Show = Callable[[Results], None]


@dataclass(frozen=True, kw_only=True)
class SavedResults(Analyses):
    """The files of one record; None for each that is missing, `problems` for each that cannot be read.

    It differs from `Results` because a record may be incomplete, and because a plan and a pipeline
    need torch: here `recipe` is the text of a file, `plan` and `environment` are decoded JSON.
    """

    name: str
    result: Result | None = None
    job: Job | None = None
    recipe: str | None = None
    plan: dict[str, Any] | None = None
    environment: dict[str, Any] | None = None
    problems: tuple[str, ...] = ()
    task: str = ""

    @property
    def overrides(self) -> tuple[str, ...]:
        """The words of the command line."""
        return tuple(self.job.overrides) if self.job else ()

    @property
    def is_stopped(self) -> bool:
        """Return whether the run was stopped."""
        return self.result is not None and self.result.status == "interrupted"

    @property
    def has_problems(self) -> bool:
        """Return whether the plan has errors."""
        return bool(self.plan and self.plan["problems"])

    @property
    def troubles(self) -> list[str]:
        """Return the errors of the plan, then the warnings."""
        return [*self.plan["problems"], *self.plan["warnings"]] if self.plan else []

    @property
    def has_example(self) -> bool:
        """Return whether the model was called, as far as that is known."""
        return self.job is None or bool(self.job.seen)

    @property
    def unchanged(self) -> bool:
        """Return whether nothing was changed, so that nothing was verified or timed."""
        return self.result is not None and self.result.reason == NOTHING_CHANGED

    @property
    def model(self) -> str:
        """The class of the model and its method; of an older record the option or `_target_` of `model`."""
        job = self.job or Job(None, None, [], {})
        if job.model:
            return job.model
        option = job.choices.get("model")
        if option and option != "custom":
            return str(option)
        targets = (text.partition("=")[2] for text in job.overrides if "model._target_=" in text)
        return next(targets, "") or "a model"


def read_results(folder: str | Path) -> SavedResults:
    """Read the record in `folder`; any file may be missing or unreadable.

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
    return SavedResults(name=folder.resolve().name, problems=tuple(problems), found=found, **parts)


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
