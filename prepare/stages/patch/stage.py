"""The stage `patch`: write the changes of the model's own code that keep the layout, as a diff."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from prepare.core.forward.example_input import read_example
from prepare.errors import ConfigError
from prepare.stages.registry import stage
from prepare.stages.stage import EXAMPLE_REMEDY, RunSettings, Stage, StageContext, Task

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from prepare.core.document import Document, ReportContext
    from prepare.stages.patch.records import Patch

TASK = "patch"


@stage(TASK)
class PatchStage(Stage):
    """A unified diff of the model's own code, verified and timed with the step keep_layout."""

    noun: ClassVar[str] = "the patch"
    order: ClassVar[int] = 70
    tasks: ClassVar[Mapping[str, Task]] = {TASK: Task("write patch.diff for the model's own code")}
    files: ClassVar[tuple[str, ...]] = ("patch.diff",)

    @classmethod
    def records(cls) -> Mapping[str, Any]:
        from prepare.stages.patch.records import Patch

        return {"patch.json": Patch}

    def steps(
        self, settings: RunSettings, steps: Mapping[str, Any], model: nn.Module
    ) -> Mapping[str, Any]:
        if not read_example(settings.input):
            raise ConfigError("input", f"task={TASK} needs an example input", EXAMPLE_REMEDY)
        from prepare.pipeline import Pipeline
        from prepare.pipeline.collect_wants import format_steps

        if not format_steps(Pipeline.from_config(steps).steps.values(), model):
            remedy = "choose memfmt=channels_last, channels_last_3d or by_rank"
            wrong = f"task={TASK} needs a format that the code shall keep"
            raise ConfigError("memfmt", wrong, remedy)
        return {"keep_layout": {}, **steps}

    def run(self, work: StageContext) -> Mapping[str, Any]:
        if work.unchanged:
            return {}
        with work.progress("writing the patch"):
            return {TASK: self._patch(work)}

    def _patch(self, work: StageContext) -> Patch:
        """Write the patch, and time the model with its calls against one without them."""
        from prepare.core.model.deep_copy import deep_copy
        from prepare.stages.bench import compare
        from prepare.stages.flow.stage import bare_tree
        from prepare.stages.patch.make_patch import make_patch
        from prepare.steps import keep_layout
        from prepare.steps.keeping.choose_calls import choose_calls

        bare = bare_tree(work, "runtime")  # a compiled model calls the original
        calls = choose_calls(bare, work.formatted, backward=work.training, amp=work.amp)
        patch = make_patch(bare, calls)
        if (verification := work.found.get("verify")) is not None:
            patch = replace(patch, verified=verification.status)
        budget = work.stages["bench"].budget
        if not budget or not patch.calls:
            return patch
        unpatched = deep_copy(work.model)
        keep_layout.undo(unpatched)
        timed = compare(
            {"as it is": unpatched, "patched": work.model},
            work.formatted,
            train=work.training,
            budget=budget,
            settle=True,
            amp=work.amp,
        )
        row = timed.row("patched")
        return replace(patch, verdict=row.verdict, ratio=row.ratio, interval=row.ratio_interval)

    @classmethod
    def document(cls, shown: ReportContext) -> Document | None:
        from prepare.stages.patch.document import patch_document

        return patch_document(shown)
