"""Carry out a job: build the model, let its stages choose, prepare, look at it and do their work."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from prepare.app.job.build_model import (
    Build,
    call_named,
    is_copied,
    model_of,
    plan_of,
    read_into,
    too_large,
)
from prepare.app.job.model_target import without_method
from prepare.app.job.results import ExampleRun, Results, Show
from prepare.audit import audit
from prepare.core.forward.call import arguments, call_of
from prepare.core.forward.compiled import compile_cache, contains_compiled
from prepare.core.forward.example_input import Example, build_example
from prepare.core.forward.run_example import count_layouts, run_example
from prepare.core.model.deep_copy import CopyError, copy_or_build
from prepare.core.utils.machine import how_threads_wait
from prepare.errors import KnownIssueError, RefusedError, combined, raise_problems
from prepare.pipeline import Pipeline
from prepare.pipeline.collect_wants import format_steps
from prepare.stages.registry import stages_of, tasks
from prepare.stages.stage import Stage, StageContext

if TYPE_CHECKING:
    from prepare.app.job.settings import Settings
    from prepare.core.utils.text import Progress

# A run of more seconds says how long it may take.
_PATIENCE = 10.0


def run_stages(
    settings: Settings,
    build: Build,
    *,
    folder: Path,
    progress: Progress,
    show: Show,
    announce: Callable[[str], None] = lambda _: None,
) -> tuple[Results, nn.Module]:
    """Return the results of a job and its model, which is prepared unless the task only looks at it.

    `show` is called with what is known so far, again and again; `announce` once, with how long a run of
    over 10 seconds may take.

    Raises:
        PrepareError: the model cannot be built, or not be prepared.
    """
    begun = time.monotonic()
    stages = [settings.stages[name] for name in stages_of(settings.task)]
    with progress(f"building {settings.model['_target_']}"):
        model = model_of(settings, build, stages)
    work = _begun(settings, model, build, stages, folder=folder, progress=progress)
    saved = settings.compile.save
    with nullcontext() if saved is None else compile_cache(saved):
        results = _prepared(settings, work, stages, show)
        with _announced(work, stages, announce, begun):
            results = _worked(work, stages, results, show)
    if saved is not None and any(s.phase == "runtime" for s in work.pipeline.steps.values()):
        note = f"the compiled code is in {saved}"
        results = replace(results, notes=[*results.notes, note])
    return results, model


def _begun(
    settings: Settings,
    model: nn.Module,
    build: Build,
    stages: list[Stage],
    *,
    folder: Path,
    progress: Progress,
) -> StageContext:
    """Return the work with the declared pipeline, or one that a stage has chosen, and its plan."""
    applies = tasks()[settings.task].prepares or not stages
    declared = Pipeline.from_config(settings.steps)
    example = _example(settings)
    batch = call_of(example).batch if example else None
    with progress("planning"):
        plan = plan_of(settings, model, declared, batch)
    # Without `strict` only the errors that are known to give wrong numbers.
    errors = [e for e in plan.errors if settings.strict or isinstance(e, KnownIssueError)]
    if errors and applies:
        raise combined(errors)
    # The plan has the repairs of what would end the process.
    declared = Pipeline.from_config(plan.steps) if applies else Pipeline([])
    work = StageContext(
        model=model,
        settings=settings,
        stages=settings.stages,
        example=example,
        pipeline=declared,
        plan=plan,
        folder=folder,
        build=lambda: model_of(settings, build, stages),
        progress=progress,
    )
    # A plan may be for another machine, and needs no batch there.
    formats = tasks()[settings.task].prepares or bool(stages)
    if example and formats:
        _require_devices(work)
    chosen = _for_example(work)
    for stage in stages:
        work.pipeline = chosen
        chosen = stage.choose(work) or chosen
    if chosen is not declared:
        work.pipeline, work.plan = chosen, plan_of(settings, model, chosen, batch)
    work.formatted = work.pipeline.formatted(example) if example and formats else example
    # As in a timing, which formats the strides of a batch only by a step for it.
    same = not (example and formats) or (
        work.pipeline.format(example.args) is example.args
        and work.pipeline.format(example.kwargs) is example.kwargs
    )
    work.unchanged = applies and not work.plan and same
    return work


def _example(settings: Settings) -> Example | None:
    """Return the example input, or what the function that it names returns; None if there is none."""
    example = build_example(settings.input, settings.seed)
    if example.factory is not None:
        made = call_named(example.factory, "input.factory", settings.seed)
        example = Example(*arguments(made))
    return example or None


def _require_devices(work: StageContext) -> None:
    """Raise RefusedError for what stands in the way of the steps, if the example cannot be formatted."""
    try:
        work.pipeline.formatted(work.needed_example())
    except Exception:
        # Torch's own words for a missing device name neither the key nor the devices that there are.
        steps = work.pipeline.steps.values()
        raise_problems(RefusedError, (p for step in steps for p in step.obstacles(work.model)))
        raise


def _for_example(work: StageContext) -> Pipeline:
    """Return the pipeline with the options that its steps find with the example."""
    steps, config = work.pipeline.steps.values(), work.pipeline.to_config()
    asking = [step for step in steps if step.without_example()]
    if not asking or not work.example:
        return work.pipeline
    with work.progress("choosing the calls to replace"):
        for step in asking:
            try:
                if reason := too_large(work.model):
                    raise CopyError(reason)
                copied = copy_or_build(work.model, work.build)
            except CopyError as error:
                work.notes.append(f"steps.{step.name}.{step.without_example()}: {error}")
                continue
            found, notes = work.pipeline.step_for(step, copied, work.example, work.amp)
            config[step.name] = found.to_options()
            work.notes += notes
    if config == work.pipeline.to_config():
        return work.pipeline
    return Pipeline.from_config(config)


def _prepared(settings: Settings, work: StageContext, stages: list[Stage], show: Show) -> Results:
    """Prepare the model, call it with its example, and audit it; or only plan."""
    plan = work.plan
    _, method = without_method(settings.model)
    problems = [str(problem) for error in plan.errors for problem in error.problems]
    work.notes[:0] = [*problems, *map(str, work.pipeline.left_out())]
    results = Results(
        model=f"{type(work.model).__name__}.{method}" if method else type(work.model).__name__,
        pipeline=work.pipeline,
        plan=plan,
        task=settings.task,
        found=work.found,
        notes=work.notes,
        amp=settings.amp,
        fail_on=settings.fail_on,
        waiting=how_threads_wait() if torch.get_num_threads() > 1 else "",
    )
    if not tasks()[settings.task].prepares:
        return results
    work.reference = None if work.unchanged else _reference(work, stages)
    with work.progress("preparing"):
        read_into(settings, work.model, work.pipeline, stages)
        # The plan has reported its known issues.
        work.pipeline.apply(work.model, strict=settings.strict, known_issues="ignore")
    example, work.took = _run_example(work)
    with work.progress("auditing"):
        audited = audit(work.model, plan=plan)
    if all(type(stage).choose is Stage.choose for stage in stages):  # nobody has tried the formats
        work.notes += _memfmt_note(work.model, work.pipeline)
    results = replace(results, example=example, audit=audited, unchanged=work.unchanged)
    # The first answer: the rest loads more of torch than everything until here.
    show(results)
    return results


@contextmanager
def _announced(
    work: StageContext, stages: list[Stage], announce: Callable[[str], None], begun: float
) -> Iterator[None]:
    """Say how long the stages may take, once the run has taken 10 seconds."""
    longest = [(stage, seconds) for stage in stages if (seconds := stage.longest(work))]
    if not longest:
        yield
        return
    spent = time.monotonic() - begun
    parts = ", ".join(f"{stage.noun} {_rounded(seconds)}" for stage, seconds in longest)
    words = " ".join(f"{stage.name}=none" for stage, _ in longest)
    total = (
        f"this run takes up to {_rounded(spent + sum(seconds for _, seconds in longest))}: {parts}"
    )
    text = f"{total}; {words} ends it after {_rounded(spent)}"
    timer = threading.Timer(max(0.0, _PATIENCE - spent), announce, [text])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _rounded(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{max(seconds, 1):.0f} s"


def _worked(work: StageContext, stages: list[Stage], results: Results, show: Show) -> Results:
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


def _run_example(work: StageContext) -> tuple[ExampleRun | None, float]:
    """Call the prepared model with its example; return what that shows, and its seconds."""
    if not work.formatted:
        return None, 0.0
    if contains_compiled(work.model):
        with work.progress("compiling at the first call"):
            run_example(work.model, work.formatted, amp=work.amp)

    with work.progress("running the example input"):
        forward = run_example(work.model, work.formatted, amp=work.amp)
    formats = {name for t in work.plan.tensors if (name := t.wants.get("memory_format"))}
    convolutions = count_layouts(forward.calls, formats)
    return ExampleRun(forward.inputs, forward.output, convolutions), forward.seconds


def _reference(work: StageContext, stages: list[Stage]) -> nn.Module | str | None:
    """Copy the unprepared model, or build it again if it cannot be copied.

    Return the reason if there is no second model, None if no stage compares with one.
    """
    if all(stage.needs_reference() == "no" for stage in stages):
        return None
    if not is_copied(work.model, stages):
        defaults = [type(stage)() for stage in stages if stage.has_level()]
        words = " or ".join(
            f"{each.name}=full" for each in defaults if each.needs_reference() == "small"
        )
        return f"{too_large(work.model)} by default; {words} copies it"
    if any(tensor.is_meta for tensor in work.model.parameters()):
        return "a model on the meta device holds no data"
    try:
        return copy_or_build(work.model, work.build)
    except CopyError as error:
        remedy = "let its code draw all numbers from torch's generator, which seed= sets"
        return f"the model cannot be copied, and {error}; {remedy}"


def _memfmt_note(model: nn.Module, pipeline: Pipeline) -> list[str]:
    """Return a note if nothing was asked of the model's convolutions."""
    steps = pipeline.steps.values()
    if format_steps(steps, model) or any(step.measures for step in steps):
        return []
    flat, deep = (
        any(isinstance(m, kind) for m in model.modules()) for kind in (nn.Conv2d, nn.Conv3d)
    )
    if not (flat or deep):
        return []
    word = "by_rank" if flat and deep else "channels_last" if flat else "channels_last_3d"
    return [f"no memfmt chosen: nothing was asked of convolutions; choose memfmt={word}"]
