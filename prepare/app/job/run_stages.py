"""Carry out a job: build the model, let its stages choose, prepare, look at it and do their work."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from prepare import checkpoint, recipe
from prepare.app.job.build_model import (
    call_named,
    import_plugins,
    is_copied,
    model_of,
    plan_of,
    read_into,
    too_large,
    with_precision,
)
from prepare.app.job.model_target import without_method
from prepare.app.job.record import Job, Results
from prepare.audit import audit
from prepare.core.forward.call import arguments, call_of
from prepare.core.forward.compiled import contains_compiled
from prepare.core.forward.example_input import Example, build_example
from prepare.core.forward.run_example import run_example
from prepare.core.model.module_tree import CopyError, copy_or_build
from prepare.errors import KnownIssueError, RefusedError, combined, raise_problems
from prepare.pipeline import Pipeline
from prepare.pipeline.pipeline import is_chosen
from prepare.stages.stage import Stage, StageContext, stages_of, tasks

if TYPE_CHECKING:
    from prepare.app.job.execute import Show
    from prepare.app.job.settings import Settings
    from prepare.core.utils.text import Progress


def run_stages(
    settings: Settings, job: Job, *, progress: Progress, show: Show
) -> tuple[Results, StageContext]:
    """Build, plan, apply, audit and let the stages work; return the results and the prepared model.

    `show` is called with what is known so far, again and again.

    Raises:
        PrepareError: the model cannot be built, or not be prepared.
    """
    import_plugins(settings.plugins)
    prepares = tasks()[settings.task].prepares
    stages = [settings.stages[name] for name in stages_of(settings.task)]
    with progress(f"building {settings.model['_target_']}"):
        model = model_of(settings, stages)
    settings = with_precision(settings, model)
    work = _planned(settings, model, stages, progress=progress)
    unsaid = [*(p for error in work.plan.errors for p in error.problems), *work.pipeline.left_out()]
    work.notes[:0] = map(str, unsaid)
    _, method = without_method(settings.model)
    job = replace(job, model=".".join(filter(None, (type(model).__name__, method))))
    results = Results(
        job=job,
        task=settings.task,
        steps=work.pipeline.to_config(),
        plan=work.plan.to_dict(),
        found=work.found,
        notes=work.notes,
        amp=settings.amp,
        unchanged=work.unchanged and prepares,
        formats=must_format(work.pipeline),
    )

    if prepares:
        work.reference = None if work.unchanged else _reference(work, stages)
        with progress("preparing"):
            read_into(settings, model, work.pipeline, stages)
            # The plan has reported its known issues.
            work.pipeline.apply(model, strict=settings.strict, known_issues="ignore")
        seen, work.took = _run_example(work)
        with progress("auditing"):
            audited = audit(model, plan=work.plan)
        job, text = replace(job, seen=seen), recipe.dumps(work.pipeline.to_recipe())
        results = replace(results, job=job, audit=audited, recipe=text)
        # The first answer: the rest loads more of torch than everything until here.
        show(results)
    for index, stage in enumerate(stages):
        work.progress = _limited(progress, stage.longest(work))
        try:
            work.found |= stage.run(work)
        except KeyboardInterrupt as stop:
            if not prepares:
                raise
            missing = " and ".join(each.noun for each in stages[index:])
            stopped = f"{str(stop) or 'stopped by Ctrl-C'}; not done: {missing}"
            return replace(results, stopped=stopped), work  # what was done is kept
        if prepares:
            show(results)
    return results, work


def save(settings: Settings, work: StageContext, results: Results, progress: Progress) -> None:
    """Save the prepared model if `save` names a file; add notes on the weights read and written."""
    if results.audit is None or results.stopped:
        return
    if settings.weights:
        work.notes.append(f"weights: those of {settings.weights}")
    if settings.save:
        with progress("saving the weights"):
            # Of what a recipe can hold: the notes say what is left out.
            recorded = Pipeline.from_config(work.pipeline.to_recipe())
            checkpoint.save(work.model, settings.save, pipeline=recorded)
        work.notes.append(f"weights: written to {settings.save}")


def _planned(
    settings: Settings, model: nn.Module, stages: list[Stage], *, progress: Progress
) -> StageContext:
    """Return the work with the declared pipeline, or one that a stage has chosen, and its plan."""
    prepares = tasks()[settings.task].prepares
    applies = prepares or not stages
    declared = Pipeline.from_config(settings.steps)
    example = _example(settings)
    batch = call_of(example).batch if example else None
    with progress("planning"):
        plan = plan_of(settings, model, declared, batch)
    # Without `strict` only the errors that are known to give wrong numbers.
    errors = [e for e in plan.errors if settings.strict or isinstance(e, KnownIssueError)]
    if errors and applies:
        raise combined(errors)
    declared = declared if applies else Pipeline([])
    work = StageContext(
        model=model,
        settings=settings,
        example=example,
        pipeline=declared,
        plan=plan,
        build=lambda: model_of(settings, stages),
        progress=progress,
    )
    # A plan may be for another machine, and needs no batch there.
    formats = prepares or bool(stages)
    if example and formats:
        _require_devices(work)
    chosen = _for_example(work)
    for stage in stages:
        work.pipeline = chosen
        chosen = stage.choose(work) or chosen
    if chosen is not declared:
        work.pipeline, work.plan = chosen, plan_of(settings, model, chosen, batch)
    work.formatted = work.pipeline.formatted(example, model) if example and formats else example
    # As in a timing, which formats the strides of a batch only by a step for it.
    same = not (example and formats) or (
        work.pipeline.format(example.args) is example.args
        and work.pipeline.format(example.kwargs) is example.kwargs
    )
    work.unchanged = applies and not work.plan and same
    return work


def must_format(pipeline: Pipeline) -> bool:
    """Return whether the user has to format a batch, as it is not the model that does."""
    given = pipeline.input_format()
    formats = given.dtype or given.device not in (None, "cpu")
    formats = formats or any(step.phase == "inputs" for step in pipeline.steps.values())
    return bool(formats) and not given.attach


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
        work.pipeline.formatted(work.needed_example(), work.model)
    except Exception:
        # Torch's own words for a missing device name neither the key nor the devices that there are.
        steps = work.pipeline.steps.values()
        raise_problems(RefusedError, (p for step in steps for p in step.obstacles(work.model)))
        raise


def _for_example(work: StageContext) -> Pipeline:
    """Return the pipeline with the options that its steps find with the example."""
    asking, config = work.pipeline.asking(), work.pipeline.to_config()
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
            # Weights that are read later: what runs, and how fast, depends on no value.
            copied._apply(lambda t: torch.zeros_like(t, device="cpu") if t.is_meta else t)
            found, notes = work.pipeline.step_for(step, copied, work.example, work.amp)
            if is_chosen(config, found):
                config[step.name] = found.to_options()
            work.notes += notes
    if config == work.pipeline.to_config():
        return work.pipeline
    return Pipeline.from_config(config)


def _limited(progress: Progress, seconds: float) -> Progress:
    """Return `progress` with how long a stage may take in its text, if that is known."""
    limit = f"{seconds / 60:.0f} min" if seconds >= 90 else f"{max(seconds, 1):.0f} s"
    return (lambda what: progress(f"{what}; up to {limit}")) if seconds else progress


def _run_example(work: StageContext) -> tuple[dict[str, Any] | None, float]:
    """Call the prepared model with its example; return what that shows for `job.json`, and its seconds."""
    if not work.formatted:
        return None, 0.0
    if contains_compiled(work.model):
        with work.progress("compiling at the first call"):
            run_example(work.model, work.formatted, amp=work.amp)

    with work.progress("running the example input"):
        forward = run_example(work.model, work.formatted, amp=work.amp)
    return {"given": forward.inputs, "gave": forward.output}, forward.seconds


def _reference(work: StageContext, stages: list[Stage]) -> nn.Module | str | None:
    """Copy the unprepared model, or build it again if it cannot be copied.

    Return the reason if there is no second model, None if no stage compares with one.
    """
    if all(stage.needs_reference() == "no" for stage in stages):
        return None
    if not is_copied(work.model, stages):
        defaults = [type(stage)() for stage in stages if stage.has_level()]
        words = " or ".join(
            f"{each.name}.seconds=60" for each in defaults if each.needs_reference() == "small"
        )
        return f"{too_large(work.model)} by default; {words} copies it"
    if any(tensor.is_meta for tensor in work.model.parameters()):
        return "a model on the meta device holds no data"
    try:
        return copy_or_build(work.model, work.build)
    except CopyError as error:
        remedy = "let its code draw all numbers from torch's generator, which seed= sets"
        return f"the model cannot be copied, and {error}; {remedy}"
