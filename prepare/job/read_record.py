"""What a run left in its folder, read once for a report: any file may be missing, or be no such file."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from prepare.audit import Audit
from prepare.bench.records import Bench
from prepare.core.utils import files
from prepare.errors import FileError, PrepareError
from prepare.flow.records import Flow
from prepare.job.record import Job, Record, Result
from prepare.tune.records import Tuning
from prepare.verify.records import Verification

# More than a plan of a hundred thousand tensors needs.
_LIMIT = 1 << 28
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Run:
    """The files of one run; None for each that is not there, `problems` for each that cannot be read."""

    name: str
    result: Result | None
    job: Job | None
    recipe: str | None
    plan: dict[str, Any] | None
    audit: Audit | None
    environment: dict[str, Any] | None
    flow: Flow | None
    flow_before: Flow | None
    verification: Verification | None
    bench: Bench | None
    tuning: Tuning | None = None
    problems: tuple[str, ...]

    @property
    def model(self) -> str:
        """What a user calls the model: its option, its class or function, or its class in the flow."""
        job = self.job or Job(None, None, [], {})
        named = job.choices.get("model")
        if named and named != "custom":
            return str(named)
        targets = (text.partition("=")[2] for text in job.overrides if "model._target_=" in text)
        in_flow = self.flow.modules[0].type if self.flow and self.flow.modules else ""
        return next(targets, "") or in_flow or "a model"


def read_run(folder: str | Path) -> Run:
    """Reads what is there.

    Raises:
        FileError: there is no such folder, or nothing of a run in it.
    """
    folder, problems = Path(folder), []
    record = Record(folder)
    readers: dict[str, tuple[str, Callable[[Path], Any]]] = {
        "result": ("result.json", lambda _: record.result()),
        "job": ("job.json", lambda _: record.job()),
        "recipe": ("recipe.yaml", lambda path: files.read_text(path, limit=_LIMIT)),
        "plan": ("plan.json", lambda path: _json(path, "prepare.plan")),
        "audit": ("audit.json", Audit.load),
        "environment": ("environment.json", lambda path: _json(path, "prepare.environment")),
        "flow": ("flow.json", Flow.load),
        "flow_before": ("flow_before.json", Flow.load),
        "verification": ("verify.json", Verification.load),
        "bench": ("bench.json", Bench.load),
        "tuning": ("tune.json", Tuning.load),
    }
    found = {key: _read(folder / name, reader, problems) for key, (name, reader) in readers.items()}
    if not problems and not any(value is not None for value in found.values()):
        wrong = "holds nothing of a run"
        raise FileError(files.shown(folder), wrong, "give the folder that a run left behind")
    return Run(name=folder.resolve().name, problems=tuple(problems), **found)


def _read(path: Path, reader: Callable[[Path], _T], problems: list[str]) -> _T | None:
    if not path.is_file():
        return None
    try:
        return reader(path)
    except PrepareError as error:
        # Without its folder: the page is to say the same wherever the folder is copied to.
        problem = error.problems[0]
        problems.append(f"{path.name}: {problem.wrong}")
        return None


def _json(path: Path, kind: str) -> dict[str, Any]:
    try:
        data = json.loads(files.read_text(path, limit=_LIMIT))
        if data["format"] == kind and data["version"] == 1:
            return data
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        wrong = f"is no {kind}: {type(error).__name__}: {error}"
        raise FileError(files.shown(path), wrong) from error
    raise FileError(files.shown(path), f"is no {kind} of version 1")
