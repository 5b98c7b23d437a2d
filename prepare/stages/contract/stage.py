"""The stage `contract`: check the prepared model against its layout contract, or write that."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from prepare.core.utils.files import printable_path
from prepare.errors import ConfigError, PrepareError, Problem
from prepare.stages.registry import stage
from prepare.stages.stage import NeedsReference, Stage, StageContext, Task, Verdict, key

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from prepare.core.document import Document, ReportContext

TASK = "contract"


@stage(TASK)
class ContractStage(Stage):
    """The check of the properties of a prepared model that a contract holds."""

    noun: ClassVar[str] = "the check of the contract"
    order: ClassVar[int] = 30
    tasks: ClassVar[Mapping[str, Task]] = {
        TASK: Task("check a layout contract, or write it", stages=("flow", TASK))
    }

    file: str = key("contract.yaml", "the contract to check, or to write", "FILE")
    update: bool = key(False, "write the contract instead of checking it", "true")
    time: bool = key(False, "also record the time relative to the unprepared model", "true")

    @classmethod
    def records(cls) -> Mapping[str, Any]:
        from prepare.stages.contract.records import ContractCheck

        return {"contract.json": ContractCheck}

    def problems(self, config: Mapping[str, Any]) -> Iterable[Problem]:
        if config.get("task") == TASK and not self.update and not Path(self.file).is_file():
            wrong = f"{printable_path(self.file)} does not exist"
            yield Problem("contract.file", wrong, "write it with contract.update=true")

    def needs_reference(self) -> NeedsReference:
        return "small"

    def run(self, work: StageContext) -> Mapping[str, Any]:
        work.needed_example()
        from prepare.stages.contract.compare import compare
        from prepare.stages.contract.observe import observe_contract
        from prepare.stages.contract.records import Contract

        reference = None if isinstance(work.reference, str) else work.reference
        with work.progress("checking the layout contract"):
            try:
                known = None if self.update else Contract.load(self.file)
            except PrepareError as error:
                raise ConfigError.of(error.problems) from error
            today = observe_contract(
                work.model,
                work.workload,
                mode=work.settings.mode,
                amp=work.amp,
                pipeline=work.pipeline,
                reference=reference,
                threads=known.threads if known else None,
                time=known.is_timed if known else self.time,
            )
        if known is None:
            today.save(self.file)
            work.notes.append(f"the contract is written to {self.file}")
            untimed = (each.untimed for each in (today, *today.sizes.values()))
            work.notes += [f"its time is noise, and not recorded: {why}" for why in untimed if why]
            return {}
        return {TASK: replace(compare(known, today), file=self.file)}

    @classmethod
    def verdict(cls, found: Mapping[str, Any]) -> Verdict | None:
        check = found.get(TASK)
        if check is None or check.status != "broken":
            return None
        first = check.changes[0]
        wrong = f"{first.what}: {first.where}: {first.text}"
        return Verdict(status="verification_failed", reason=TASK, error=wrong)

    @classmethod
    def document(cls, shown: ReportContext) -> Document | None:
        from prepare.stages.contract.document import contract_document

        return contract_document(shown)
