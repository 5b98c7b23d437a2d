"""Carry out a job: build the model, let its stages choose, prepare, look at it and do their work."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from prepare.audit import audit
from prepare.core.forward.compiled import CacheCounts, compile_cache, contains_compiled
from prepare.core.forward.example_input import build_example
from prepare.core.forward.run_example import count_layouts, run_example
from prepare.core.model.deep_copy import CopyError, copy_or_build
from prepare.core.utils.progress import stage_if
from prepare.core.utils.text import size
from prepare.errors import ConfigError, KnownIssueError, combined
from prepare.job import load_weights
from prepare.job.load_weights import LARGEST, bytes_of, is_copied
from prepare.job.model_target import locate_named
from prepare.job.results import ExampleRun, Results
from prepare.pipeline import Pipeline
from prepare.registry import stages_of, tasks
from prepare.stage import Stage, Work
from prepare.steps.input_format import InputFormat

if TYPE_CHECKING:
    from prepare.core.forward.example_input import Example
    from prepare.core.utils.progress import Stage as Progress
    from prepare.job.results import Show
    from prepare.job.settings import Settings
    from prepare.plan import Plan

Build = Callable[[Mapping[str, Any]], Any]


def carry_out(
    settings: Settings, build: Build, *, folder: Path, progress: Progress, show: Show
) -> tuple[Results, nn.Module]:
    """Return the results of a job and its model, which is prepared unless the task only looks at it.

    `show` is called with what is known so far, again and again.

    Raises:
        PrepareError: the model cannot be built, or not be prepared.
    """
    stages = [settings.stages[name] for name in stages_of(settings.task)]
    for stage in stages:
        stage.begin(settings, locate_named)
    with progress(f"building {settings.model['_target_']}"):
        model = load_weights.model_of(settings, build, stages)
    work = _begun(settings, model, build, stages, folder=folder, progress=progress)
    with kept_compilations(settings) as counts:
        results = _prepared(work, stages, show)
        results = _worked(work, stages, results, show)
    if counts is not None and any(s.phase == "runtime" for s in work.pipeline.steps.values()):
        note = f"compiled code in {settings.compile.save}: {counts}"
        results = replace(results, notes=[*results.notes, note])
    return results, model


def kept_compilations(settings: Settings) -> AbstractContextManager[CacheCounts | None]:
    """Return a context in which torch compiles into the folder `compile.save`, and counts what it reads.

    Raises:
        FileError: the folder cannot be made.
    """
    saved = settings.compile.save
    return nullcontext() if saved is None else compile_cache(saved)


def _begun(
    settings: Settings,
    model: nn.Module,
    build: Build,
    stages: list[Stage],
    *,
    folder: Path,
    progress: Progress,
) -> Work:
    """Return the work with the declared pipeline, or one that a stage has chosen, and its plan."""
    example = build_example(settings.input, settings.seed) or None
    steps: Mapping[str, Any] = settings.steps
    for stage in stages:
        steps = stage.steps(settings, steps)
    applies = tasks()[settings.task].prepares or not stages
    declared = Pipeline.from_config(steps) if applies else Pipeline([])
    with stage_if(applies, progress, "planning"):
        plan = load_weights.plan_of(settings, model, declared)
    if errors := _errors(plan, settings):
        raise combined(errors)
    work = Work(
        model=model,
        settings=settings,
        stages=settings.stages,
        example=example,
        pipeline=declared,
        plan=plan,
        folder=folder,
        build=lambda: load_weights.model_of(settings, build, stages),
        locate=locate_named,
        progress=progress,
    )
    chosen = _for_example(work)
    for stage in stages:
        work.pipeline = chosen
        chosen = stage.choose(work) or chosen
    if chosen is not declared:
        work.pipeline, work.plan = chosen, load_weights.plan_of(settings, model, chosen)
    work.formatted = example and formatted(example, work.pipeline)
    same = not example or (
        work.formatted is not None
        and work.formatted.args is example.args
        and work.formatted.kwargs is example.kwargs
    )
    work.unchanged = applies and not work.plan and same
    return work


def _for_example(work: Work) -> Pipeline:
    """Return the pipeline with the options that its steps find with the example."""
    config = work.pipeline.to_config()
    asking = [step for step in work.pipeline.steps.values() if step.without_example()]
    if not asking or not work.example:
        return work.pipeline
    with work.progress("choosing the calls to replace"):
        for step in asking:
            kept = f"steps.{step.name}.{step.without_example()}"
            if (held := bytes_of(work.model)) > LARGEST:
                reason = f"the model holds {size(held)}, too much to copy it"
                work.notes.append(f"{kept}: {reason}")
                continue
            others = Pipeline(
                [
                    each
                    for each in work.pipeline.steps.values()
                    if each.name != step.name and each.phase != "runtime"
                ]
            )
            try:
                copied = copy_or_build(work.model, work.build)
            except CopyError as error:
                work.notes.append(f"{kept}: {error}")
                continue
            others.apply(copied, strict=False, known_issues="ignore")
            example = formatted(work.example, others)
            found, notes = step.for_example(copied, example, backward=work.training, amp=work.amp)
            config[step.name] = found.to_options()
            work.notes += notes
    if config == work.pipeline.to_config():
        return work.pipeline
    return Pipeline.from_config(config)


def _prepared(work: Work, stages: list[Stage], show: Show) -> Results:
    """Prepare the model, call it with its example, and audit it; or only plan."""
    settings, plan = work.settings, work.plan
    problems = [str(problem) for error in plan.errors for problem in error.problems]
    work.notes[:0] = [*problems, *map(str, work.pipeline.left_out())]
    results = Results(
        model=type(work.model).__name__,
        pipeline=work.pipeline,
        plan=plan,
        task=settings.task,
        found=work.found,
        notes=work.notes,
        warnings=[str(warning) for warning in plan.warnings],
        amp=settings.amp,
    )
    if not tasks()[settings.task].prepares:
        return results
    work.reference = None if work.unchanged else _reference(work, stages)
    with work.progress("preparing"):
        load_weights.read_into(settings, work.model, work.pipeline, stages)
        # The plan has reported its known issues.
        work.pipeline.apply(work.model, strict=settings.strict, known_issues="ignore")
    example, work.took = _run_example(work)
    with work.progress("auditing"):
        audited = audit(work.model, plan=plan)
    work.notes += _memfmt_note(work.model, work.pipeline)
    results = replace(results, example=example, audit=audited, unchanged=work.unchanged)
    # The first answer: the rest loads more of torch than everything until here.
    show(results)
    return results


def _worked(work: Work, stages: list[Stage], results: Results, show: Show) -> Results:
    """Let each stage do its work; Ctrl-C ends the rest, and what was done is kept."""
    for index, stage in enumerate(stages):
        try:
            work.found |= stage.run(work)
        except KeyboardInterrupt as stop:
            if results.audit is None:
                raise
            missing = " and ".join(each.noun for each in stages[index:])
            stopped = f"{str(stop) or 'stopped by Ctrl-C'}; not done: {missing}"
            return replace(results, stopped=stopped)
        if results.audit is not None:
            show(results)
    return results


def _run_example(work: Work) -> tuple[ExampleRun | None, float]:
    """Call the prepared model with its example; return what that shows, and its seconds."""
    if not work.formatted:
        return None, 0.0
    if contains_compiled(work.model):
        with work.progress("compiling at the first call"):
            run_example(work.model, work.formatted, amp=work.amp)
    with work.progress("running the example input"):
        start = time.perf_counter()
        forward = run_example(work.model, work.formatted, amp=work.amp)
        seconds = time.perf_counter() - start
    formats = {name for t in work.plan.tensors if (name := t.wants.get("memory_format"))}
    convolutions = count_layouts(forward.calls, formats)
    return ExampleRun(forward.inputs, forward.output, convolutions), seconds


def _reference(work: Work, stages: list[Stage]) -> nn.Module | str | None:
    """Copy the unprepared model, or build it again if it cannot be copied.

    Return the reason if there is no second model, None if no stage compares with one.
    """
    if all(stage.copies() == "no" for stage in stages):
        return None
    if not is_copied(work.model, stages):
        wrong = f"the model holds {size(bytes_of(work.model))}, too much to copy it by default"
        return f"{wrong}; verify=full or bench=full copies it"
    if any(tensor.is_meta for tensor in work.model.parameters()):
        return "a model on the meta device holds no data"
    try:
        return copy_or_build(work.model, work.build)
    except CopyError as error:
        remedy = "let its code draw all numbers from torch's generator, which seed= sets"
        return f"the model cannot be copied, and {error}; {remedy}"


def formatted(example: Example, pipeline: Pipeline) -> Example:
    """Format the example for the pipeline, which need not have an input step."""
    steps = pipeline.steps.values()
    formats = next((s for s in steps if isinstance(s, InputFormat)), InputFormat()).bind(steps)
    return replace(
        example, args=formats.format(example.args), kwargs=formats.format(example.kwargs)
    )


def _memfmt_note(model: nn.Module, pipeline: Pipeline) -> list[str]:
    """Return a note if nothing was asked of the model's convolutions."""
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
