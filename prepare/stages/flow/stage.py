"""The stage `flow`: find where activations lose the layout, and which steps would keep it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from prepare.errors import Problem
from prepare.stages.stage import Stage, StageContext, Task, key, stage

if TYPE_CHECKING:
    from torch import nn

    from prepare.core.document import Document, ReportContext
    from prepare.stages.flow.records import Flow

Level = Literal["none", "predict", "observe"]


@stage("flow")
class FlowStage(Stage):
    """The layout flow of the prepared model; with repairs also the one without them."""

    noun: ClassVar[str] = "the layout flow"
    order: ClassVar[int] = 20
    default: ClassVar[bool] = True
    # torch's fake tensors import its compiler at their first use.
    imports: ClassVar[tuple[str, ...]] = ("prepare.stages.flow.follow", "torch._dynamo")
    tasks: ClassVar[Mapping[str, Task]] = {
        "flow": Task(
            "show where the model would lose its layout with the steps; prepare nothing",
            stages=("flow",),
            prepares=False,
        )
    }
    fails: ClassVar[tuple[str, ...]] = ("breaks",)

    level: Level = key("predict", "find where activations lose the layout")

    @classmethod
    def records(cls) -> Mapping[str, Any]:
        from prepare.stages.flow.records import Flow

        return {"flow.json": Flow, "flow_before.json": Flow}

    def problems(self, config: Mapping[str, Any]) -> Iterable[Problem]:
        if config.get("task") == "flow" and self.level == "none":
            wrong = "task=flow cannot run without a flow"
            yield Problem("flow", wrong, "choose flow=predict or observe")

    @classmethod
    def failure(cls, word: str, found: Mapping[str, Any]) -> str:
        from prepare.stages.flow.document import why_not_kept

        return why_not_kept(found.get("flow"))

    def run(self, work: StageContext) -> Mapping[str, Any]:
        if work.settings.task == "flow":
            work = _with_steps(work)
        if self.level == "none" or not work.formatted:
            return {}
        from prepare.stages import flow

        with work.progress("following the layout of activations"):
            follow: Any = flow.predict if self.level == "predict" else flow.observe
            if self.level == "predict" and _is_for_absent_cuda(work):
                follow = partial(flow.predict, device="cuda")
            record = follow(work.model, work.formatted, amp=work.amp)
            if not work.pipeline.steps:
                return {"flow": record}
            records = {"flow": _with_remedy(work, record)}
            if bare := _without_repairs(work):
                records["flow_before"] = flow.predict(bare, work.formatted, amp=work.amp)
        return records

    @classmethod
    def figures(cls, found: Mapping[str, Any]) -> dict[str, Any]:
        flow = found.get("flow")
        if flow is None:
            return {}
        summary = flow.summary
        return {
            "flow": flow.status,
            "layout_asked": not {*flow.wanted.values()} <= {"contiguous"},
            "layout_breaks": summary["breaks"],
            "copied_bytes": summary["copied_bytes"],
            "convolutions_called": summary["convolutions"],
            "convolutions_kept": summary["in_layout"],
        }

    @classmethod
    def document(cls, shown: ReportContext) -> Document | None:
        from prepare.stages.flow.document import flow_document

        return flow_document(shown)


def _is_for_absent_cuda(work: StageContext) -> bool:
    """Return whether `task=flow` is asked for a CUDA device, and there is none."""
    import torch

    asked = str((work.settings.steps.get("device") or {}).get("device", ""))
    is_flow = work.settings.task == "flow"
    return is_flow and asked.startswith("cuda") and not torch.cuda.is_available()


def _with_steps(work: StageContext) -> StageContext:
    """Return the context with a copy of the model to which the declared steps are applied, on its device."""
    from prepare.core.model.module_tree import clone_of, copy_tree
    from prepare.pipeline import Pipeline

    example, settings = work.needed_example(), work.settings
    declared = Pipeline.from_config(settings.steps).steps.values()
    left = ", ".join(step.name for step in declared if step.phase == "runtime")
    pipeline = Pipeline(s for s in declared if s.phase != "runtime" and s.name != "device")
    if left:
        why = "task=flow follows the operations of the model itself"
        work.notes.append(f"{left}: not applied: {why}")
    if not pipeline.steps:
        return work
    with work.progress("applying the steps to a copy"):
        model = copy_tree(work.model, clone_of)
        options: Any = {"strict": settings.strict, "amp": work.amp, "example": example}
        pipeline.apply(model, known_issues="ignore", **options)
    return replace(
        work, model=model, pipeline=pipeline, formatted=pipeline.formatted(example, model)
    )


def _with_remedy(work: StageContext, flow: Flow) -> Flow:
    """Return the flow with the steps that would remove breaks from it, if any would."""
    if flow.status != "ok":
        return flow
    from prepare.stages.flow.find_remedy import find_remedy

    bare = _bare(work, "runtime")  # a compiled model calls the original
    remedy = find_remedy(bare, work.formatted, flow, work.pipeline.steps, work.amp)
    return replace(flow, remedy=remedy)


def _without_repairs(work: StageContext) -> nn.Module | None:
    """Return a copy of the model without repairs and rewritten calls; None if it has neither."""
    if work.pipeline.steps.keys().isdisjoint(("keep_layout", "repair_layout")):
        return None
    return _bare(work, "structure", "runtime")


def _bare(work: StageContext, *phases: str) -> nn.Module:
    """Return a copy of the model that shares its tensors, without the steps of some phases."""
    from prepare.core.model.module_tree import copy_tree

    bare = copy_tree(work.model)
    work.pipeline.undo(bare, phases=phases)
    return bare
