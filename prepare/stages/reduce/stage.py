"""The stage `reduce`: a short script, with torch alone, of the first module whose results are wrong."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from prepare.stages.registry import stage
from prepare.stages.stage import Stage, StageContext, Task

if TYPE_CHECKING:
    from prepare.core.document import Document, ReportContext
    from prepare.stages.verify.records import Verification

TASK, SCRIPT = "reduce", "reduced.py"


@stage(TASK)
class ReduceStage(Stage):
    """The reduction of the first module that is wrong by itself."""

    noun: ClassVar[str] = "the reduction"
    order: ClassVar[int] = 80
    tasks: ClassVar[Mapping[str, Task]] = {
        TASK: Task(
            "make a script of the first module that is wrong", stages=("flow", "verify", TASK)
        )
    }

    @classmethod
    def records(cls) -> Mapping[str, Any]:
        from prepare.stages.reduce.records import Reduction

        return {SCRIPT: Reduction}

    def run(self, work: StageContext) -> Mapping[str, Any]:
        if work.unchanged:
            return {}
        from prepare.core.forward.workload import sizes_of
        from prepare.stages.reduce import reduce

        example = work.needed_example()
        verification = work.found.get("verify")
        if verification and verification.size:  # of several the one that is wrong
            example = dict(sizes_of(work.workload)).get(verification.size, example)
        seconds = work.stages["verify"].seconds or 60.0
        if verification and _is_wrong_compiled_only(verification):
            from prepare.stages.reduce.blame_compiler import blame_compiler

            with work.progress("bisecting the compiler"):
                text = blame_compiler(
                    work.model,
                    example,
                    pipeline=work.pipeline,
                    training=work.training,
                    seconds=seconds,
                )
            work.notes.insert(0, text)  # the answer to what was asked
            return {}
        with work.progress("reducing the first wrong module to a script"):
            found = reduce(
                work.model,
                example,
                pipeline=work.pipeline,
                culprit=verification.culprit if verification else "",
                training=work.training,
                seconds=seconds,
            )
        if found is None:
            text = (
                "no module of torch is wrong by itself on inputs of this size, mean and deviation"
            )
            work.notes.insert(0, text)  # the answer to what was asked
            return {}
        return {"reduced": found}

    @classmethod
    def document(cls, shown: ReportContext) -> Document | None:
        from prepare.stages.reduce.document import reduce_document

        return reduce_document(shown)


def _is_wrong_compiled_only(verification: Verification) -> bool:
    """Return whether the model is right without its compiler, and not with it."""
    failed = [check for check in verification.checks if check.status == "fail"]
    return bool(failed) and all("compiled" in check.inputs for check in failed)
