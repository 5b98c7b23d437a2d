"""The results of one job: as the job makes them, and as they are read back from its record without torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from prepare.audit import Audit
from prepare.bench.records import Bench
from prepare.contract.records import ContractCheck
from prepare.core.utils import files, json_records
from prepare.core.utils.environment import check_environment
from prepare.errors import FileError, PrepareError
from prepare.export.records import Export
from prepare.flow.records import Flow
from prepare.job.record import NOTHING_CHANGED, Job, Record, Result
from prepare.patch.records import Patch
from prepare.tune.records import Tuning
from prepare.verify.records import Verification

if TYPE_CHECKING:
    from prepare.core.forward.conv_layouts import LayoutCount
    from prepare.pipeline import Pipeline
    from prepare.plan import Plan
    from prepare.reduce.records import Reduction

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
# The script of task=reduce.
REDUCED = "reduced.py"
# The file of each analysis, by its field in `Analyses`, in the order in which they are written.
_FILES: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "flow": ("flow.json", Flow.load),
    "flow_before": ("flow_before.json", Flow.load),
    "verification": ("verify.json", Verification.load),
    "bench": ("bench.json", Bench.load),
    "tuning": ("tune.json", Tuning.load),
    "export": ("export.json", Export.load),
    "contract": ("contract.json", ContractCheck.load),
    "patch": ("patch.json", Patch.load),
}
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Analyses:
    """The audit and the analyses of one model; None for each that did not run.

    `flow_before` is the layout flow of the prepared model without repairs and rewritten calls.
    """

    audit: Audit | None = None
    flow: Flow | None = None
    flow_before: Flow | None = None
    verification: Verification | None = None
    bench: Bench | None = None
    tuning: Tuning | None = None
    export: Export | None = None
    contract: ContractCheck | None = None
    patch: Patch | None = None


@dataclass(frozen=True)
class ExampleRun:
    """The forward of the example input: its inputs and outputs in words, and the layouts of convolutions."""

    inputs: str
    outputs: str
    convolutions: list[LayoutCount]


@dataclass(frozen=True, kw_only=True)
class Results(Analyses):
    """The results of a job that came to its end, in the process that executed it.

    `model` is the name of the model's class; `notes` and `warnings` are shown in the terminal. `stopped`
    says what is missing if the job was interrupted after the model was prepared. `unchanged` says that the
    pipeline changes neither the model nor its example, so that nothing is verified or timed. `amp` is the
    autocast of every forward.
    """

    model: str
    pipeline: Pipeline
    plan: Plan
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    example: ExampleRun | None = None
    stopped: str = ""
    unchanged: bool = False
    amp: str = "none"
    reduction: Reduction | None = None

    def write(self, record: Record, job: Job) -> None:
        """Write every file of the record, except its pages and its result. Raises FileError."""
        from prepare.core.utils.environment import environment

        record.write_plan(self.plan)
        if self.audit is not None:
            record.write_prepared(self.pipeline, self.audit)
        for key, (name, _) in _FILES.items():
            if (analysis := getattr(self, key)) is not None:
                analysis.save(record.folder / name)
        if self.reduction is not None:
            files.write_text(record.folder / REDUCED, self.reduction.script)
        record.write_environment(environment())
        record.write_job(job)

    def seen(self) -> dict[str, Any] | None:
        """Return the example run as it is written to `job.json`."""
        if self.example is None:
            return None
        convolutions = [asdict(seen) for seen in self.example.convolutions]
        return {
            "given": self.example.inputs,
            "gave": self.example.outputs,
            "convolutions": convolutions,
        }


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
    reduced: str | None = None
    plan: dict[str, Any] | None = None
    environment: dict[str, Any] | None = None
    problems: tuple[str, ...] = ()

    @property
    def unchanged(self) -> bool:
        """Return whether nothing was changed, so that nothing was verified or timed."""
        return self.result is not None and self.result.reason == NOTHING_CHANGED

    @property
    def model(self) -> str:
        """The option chosen in the group `model`, else the model's `_target_`, else its class in the flow."""
        job = self.job or Job(None, None, [], {})
        option = job.choices.get("model")
        if option and option != "custom":
            return str(option)
        targets = (text.partition("=")[2] for text in job.overrides if "model._target_=" in text)
        in_flow = self.flow.modules[0].type if self.flow and self.flow.modules else ""
        return next(targets, "") or in_flow or "a model"


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
        "reduced": (REDUCED, lambda path: files.read_text(path, limit=json_records.LIMIT)),
        "plan": ("plan.json", lambda _: read_plan(folder)),
        "audit": ("audit.json", Audit.load),
        "environment": (
            "environment.json",
            lambda path: json_records.read_record(path, _ENVIRONMENT, check_environment),
        ),
        **_FILES,
    }
    parts = {key: _read(folder / name, reader, problems) for key, (name, reader) in readers.items()}
    if not problems and not any(value is not None for value in parts.values()):
        wrong = "is not the record of a job"
        raise FileError(
            files.printable_path(folder), wrong, "give the folder that a job has written"
        )
    return SavedResults(name=folder.resolve().name, problems=tuple(problems), **parts)


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
