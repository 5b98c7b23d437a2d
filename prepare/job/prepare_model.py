"""Prepare the model of a job: plan, apply, run its example, audit it, and follow its activations."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from prepare.core.utils.progress import stage_if
from prepare.errors import ConfigError, KnownIssueError, combined
from prepare.job.compare_models import Compared, with_comparison, with_contract, with_export
from prepare.job.results import ExampleRun, Results

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

    from prepare.core.forward.example_input import Example
    from prepare.core.utils.progress import Stage
    from prepare.flow.records import Flow
    from prepare.job.results import Show
    from prepare.job.settings import Settings
    from prepare.pipeline import Pipeline
    from prepare.plan import Plan


def prepare_model(
    settings: Settings,
    model: nn.Module,
    stage: Stage,
    build: Callable[[], nn.Module],
    show: Show,
    *,
    folder: Path,
) -> Results:
    """Return the results of the model, which is prepared in place unless the task is a plan.

    `show` is called with what is known so far, again and again.

    Raises:
        PrepareError: the model cannot be prepared.
    """
    from prepare.audit import audit
    from prepare.job import analyses, artefacts
    from prepare.job import load_weights as weights

    example = analyses.example_of(settings)
    pipeline, plan, chosen = _planned(settings, model, stage, build, example)
    tuning = None
    if settings.task == "tune":
        tuning = analyses.tuning_of(settings, model, stage, build, pipeline)
        pipeline = tuning.pipeline
        plan = pipeline.plan(model, known_issues=settings.known_issues, amp=settings.amp)
    results = Results(
        model=type(model).__name__,
        pipeline=pipeline,
        plan=plan,
        notes=[
            *(str(problem) for error in plan.errors for problem in error.problems),
            *map(str, pipeline.left_out()),
            *chosen,
        ],
        warnings=[str(warning) for warning in plan.warnings],
        tuning=tuning,
        amp=settings.amp,
    )
    if settings.task == "plan":
        return results
    formatted = example and analyses.formatted(example, pipeline)
    unchanged = not plan and (not example or analyses.is_same(example, formatted))
    reference = None if unchanged else analyses.reference_of(settings, model, build)
    with stage("preparing"):
        weights.read_into(settings, model, pipeline)
        # The plan has reported its known issues.
        pipeline.apply(model, strict=settings.strict, known_issues="ignore")
    example_run, seconds = _run_example(settings, model, formatted, plan, stage)
    with stage("auditing"):
        audited = audit(model, plan=plan)
    notes = [*results.notes, *_memfmt_note(model, pipeline)]
    results = replace(results, notes=notes, example=example_run, audit=audited)
    # The first answer: the rest loads more of torch than everything until here.
    show(results)
    flow, flow_before = _flow(settings, pipeline, model, formatted, stage)
    results = replace(results, flow=flow, flow_before=flow_before)
    given = Compared(pipeline, reference, model, example)
    if settings.task == "contract":
        show(results)
        return with_contract(settings, results, given, stage)
    if settings.task == "export":
        show(results)
        return with_export(settings, results, given, stage, show, folder=folder)
    if unchanged:
        return replace(results, unchanged=True)
    show(results)
    results = with_comparison(settings, results, given, stage, show, took=seconds)
    if settings.task == "patch" and not results.stopped:
        with stage("writing the patch"):
            patch = artefacts.patch_of(settings, model, formatted, results.verification)
        results = replace(results, patch=patch)
    return results


def _planned(
    settings: Settings,
    model: nn.Module,
    stage: Stage,
    build: Callable[[], nn.Module],
    example: Example | None,
) -> tuple[Pipeline, Plan, list[str]]:
    """Return the pipeline with the calls that it replaces, its plan, and notes."""
    from prepare.job.keep_calls import steps_of, with_calls
    from prepare.job.load_weights import plan_of
    from prepare.pipeline import Pipeline

    declared = Pipeline.from_config(steps_of(settings, example))
    with stage("planning"):
        plan = plan_of(settings, model, declared)
    if errors := _errors(plan, settings):
        raise combined(errors)
    with stage_if(
        "keep_layout" in declared.steps and example, stage, "choosing the calls to replace"
    ):
        pipeline, notes = with_calls(settings, model, declared, example, build)
    if pipeline is not declared:
        plan = plan_of(settings, model, pipeline)
    return pipeline, plan, notes


def _run_example(
    settings: Settings, model: nn.Module, example: Example | None, plan: Plan, stage: Stage
) -> tuple[ExampleRun | None, float]:
    """Call the prepared model with its example; return what that shows, and its seconds."""
    from prepare.core.forward.compiled import contains_compiled
    from prepare.core.forward.conv_layouts import count_layouts
    from prepare.core.forward.run_example import run_example

    if not example:
        return None, 0.0
    if contains_compiled(model):
        with stage("compiling at the first call"):
            run_example(model, example, amp=settings.amp)
    with stage("running the example input"):
        start = time.perf_counter()
        forward = run_example(model, example, amp=settings.amp)
        seconds = time.perf_counter() - start
    formats = {name for t in plan.tensors if (name := t.wants.get("memory_format"))}
    convolutions = count_layouts(forward.calls, formats)
    return ExampleRun(forward.inputs, forward.output, convolutions), seconds


def _flow(
    settings: Settings,
    pipeline: Pipeline,
    model: nn.Module,
    formatted: Example | None,
    stage: Stage,
) -> tuple[Flow | None, Flow | None]:
    """Return the layout flow of the prepared model, and the one without its repairs."""
    from prepare.job import analyses

    with stage_if(
        settings.flow != "none" and formatted, stage, "following the layout of activations"
    ):
        flow = analyses.flow_of(settings, model, formatted)
        flow = analyses.with_remedy(settings, pipeline, model, formatted, flow)
        return flow, flow and analyses.flow_without_repairs(settings, pipeline, model, formatted)


def follow_unprepared(settings: Settings, model: nn.Module, stage: Stage) -> Results:
    """Follow the layout of the activations of a model that is not prepared."""
    from prepare.job import analyses
    from prepare.pipeline import Pipeline

    unprepared = Pipeline([])
    example = analyses.example_of(settings)
    if not example:
        remedy = "give one with input.shape=[...]"
        raise ConfigError("input", "task=flow needs an example input", remedy)
    plan = unprepared.plan(model)
    with stage("following the layout of activations"):
        flow = analyses.flow_of(settings, model, analyses.formatted(example, unprepared))
    steps = ", ".join(name for name in settings.steps if name != "device")
    notes = [f"{steps}: not applied: task=flow analyses the unprepared model"] if steps else []
    name = type(model).__name__
    return Results(
        model=name, pipeline=unprepared, plan=plan, notes=notes, flow=flow, amp=settings.amp
    )


def _memfmt_note(model: nn.Module, pipeline: Pipeline) -> list[str]:
    """Return a note if nothing was asked of the model's convolutions."""
    from torch import nn

    if any(name.endswith("_memory_format") for name in pipeline.steps):
        return []
    ranks = {
        rank
        for module in model.modules()
        for rank, kind in ((2, nn.Conv2d), (3, nn.Conv3d))
        if isinstance(module, kind)
    }
    if not ranks:
        return []
    word = "channels_last" if ranks == {2} else "channels_last_3d" if ranks == {3} else "by_rank"
    text = f"no memfmt chosen: nothing was asked of convolutions; choose memfmt={word}"
    return [text]


def _errors(plan: Plan, settings: Settings) -> list[ConfigError]:
    """Return the errors that stop a job: without `strict` only those known to give wrong numbers."""
    return [e for e in plan.errors if settings.strict or isinstance(e, KnownIssueError)]
