"""The stage `export`: write the prepared model in another format, and check that artefact."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar, Self

from prepare.core.forward.example_input import read_example
from prepare.core.utils.options import as_written
from prepare.core.utils.suggest import choose_option
from prepare.errors import ConfigError, PrepareError, Problem, RefusedError
from prepare.stages.export.exporter import EXPORTERS, Exporter, is_plain_name
from prepare.stages.registry import stage
from prepare.stages.stage import (
    EXAMPLE_REMEDY,
    NeedsReference,
    RunSettings,
    Stage,
    StageContext,
    Task,
    Verdict,
)

if TYPE_CHECKING:
    from pathlib import Path

    from prepare.core.document import Document, ReportContext

TASK = "export"


@stage(TASK)
class ExportTask(Stage):
    """The export of the prepared model, and the checks of the artefact in its own runtime."""

    noun: ClassVar[str] = "the export"
    order: ClassVar[int] = 60
    groups: ClassVar[bool] = True
    tasks: ClassVar[Mapping[str, Task]] = {
        TASK: Task(
            "write the prepared model in a format of the group export, and check that",
            stages=("flow", "verify", TASK),
        )
    }

    options: Mapping[str, Any]

    @classmethod
    def records(cls) -> Mapping[str, Any]:
        from prepare.stages.export.records import Export

        return {"export.json": Export}

    @classmethod
    def from_options(cls, options: Any, config: Mapping[str, Any]) -> Self:
        options = {} if options is None else options
        if not isinstance(options, Mapping):
            wrong = f"{as_written(options)} is not a mapping"
            remedy = f"choose an option of the group, or set its keys as {TASK}.KEY=value"
            raise ConfigError(TASK, wrong, remedy)
        if problems := list(_problems(options, config)):
            raise ConfigError.of(problems)
        return cls(options=options)

    @classmethod
    def files_in(cls, folder: Path) -> Iterable[str]:
        from prepare.stages.export.records import Export

        yield from super().files_in(folder)
        for kind in EXPORTERS.values():
            yield from (f"model{end}" for end in (kind.suffix, *kind.beside))
        with suppress(PrepareError):
            # Names without folders, whatever a record of somebody else holds.
            yield from filter(is_plain_name, Export.load(folder / "export.json").files)

    def check_early(self, settings: RunSettings, locate: Callable[[str, str], Any]) -> None:
        if problem := exporter_of(self.options).missing():
            raise ConfigError.of([problem])
        if not read_example(settings.input):
            raise ConfigError("input", f"task={TASK} needs an example input", EXAMPLE_REMEDY)

    def needs_reference(self) -> NeedsReference:
        return "always"

    def leaves_out(self) -> Iterable[str]:
        from prepare.registry import STEPS

        keeps = exporter_of(self.options).keeps
        return [name for name, cls in STEPS.items() if cls.only_layouts and name not in keeps]

    def run(self, work: StageContext) -> Mapping[str, Any]:
        verification = work.found.get("verify")
        if verification is not None and verification.status == "fail":
            return {}
        from prepare.core.model.deep_copy import deep_copy
        from prepare.stages.export import export

        if isinstance(work.reference, str):
            raise RefusedError(TASK, f"there is no model to compare with: {work.reference}")
        record = export(
            deep_copy(work.model) if work.reference is None else work.reference,
            work.example,
            to=exporter_of(self.options),
            folder=work.folder,
            pipeline=work.pipeline,
            prepared=work.model,
            budget=work.stages["bench"].budget,
            progress=work.progress,
        )
        return {TASK: record}

    @classmethod
    def verdict(cls, found: Mapping[str, Any]) -> Verdict | None:
        export = found.get(TASK)
        known = {"fail": "verification_failed", "refused": "failed"}
        if export is None or export.status not in known:
            return None
        return Verdict(status=known[export.status], reason=TASK, error=export.reason)

    @classmethod
    def figures(cls, found: Mapping[str, Any]) -> dict[str, Any]:
        from prepare.stages.export.records import ARTEFACT

        export = found.get(TASK)
        if export is None:
            return {}
        values: dict[str, Any] = {"exporter": export.exporter, "exported": export.status}
        values |= {"artefact": export.artefact, "artefact_bytes": export.bytes}
        if (worst := export.worst) is not None:
            values |= {"artefact_error": worst.error, "artefact_allowed": worst.allowed}
        if export.time is not None:
            ratio = export.time.row(ARTEFACT).ratio
            known = ratio is not None and math.isfinite(ratio)
            values["artefact_time_ratio"] = ratio if known else None
        return values

    @classmethod
    def document(cls, shown: ReportContext) -> Document | None:
        from prepare.stages.export.document import export_document

        return export_document(shown)


def exporter_of(options: Mapping[str, Any]) -> Exporter:
    """Return the exporter that the options name.

    Raises:
        ConfigError: with one problem for every error in them.
    """
    rest = dict(options)
    name = rest.pop("exporter", None)
    if not isinstance(name, str):
        wrong = f"{as_written(name)} is not an exporter"
        remedy = choose_option("", TASK, list(EXPORTERS), noun="exporters")
        raise ConfigError("export.exporter", wrong, remedy)
    return EXPORTERS[name].from_options(rest)


def _problems(options: Mapping[str, Any], config: Mapping[str, Any]) -> Iterable[Problem]:
    """Yield the problems of the options, and of what they need of the rest of the configuration."""
    task = config.get("task")
    if task != TASK:
        if options:
            remedy = f"write task={TASK} to export, or drop it"
            yield Problem(TASK, f"is for task={TASK}, and this is task={task}", remedy)
        return
    if not options:
        names = ", ".join(EXPORTERS)
        yield Problem(TASK, "no format is chosen", f"choose export=NAME; formats: {names}")
        return
    if config.get("mode") == "train":
        yield Problem("mode", "an artefact is for inference", "drop mode=train")
    if config.get("amp", "none") != "none":
        remedy = "choose precision=bfloat16, or drop amp"
        yield Problem("amp", "an artefact holds no autocast", remedy)
    if config.get("plugins") and options.get("exporter") not in EXPORTERS:
        return  # A plugin may register it; plugins are imported only in the job.
    try:
        exporter_of(options)
    except ConfigError as error:
        yield from error.problems
