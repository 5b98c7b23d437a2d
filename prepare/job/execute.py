"""Execute one job: build the model, prepare it, analyse it, audit it, and write its record."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from prepare.core.utils.signals import held_interrupts
from prepare.core.utils.telemetry import switch_off_telemetry
from prepare.core.utils.wording import command_line_words
from prepare.errors import CheckpointError, ConfigError, FileError, KnownIssueError, combined
from prepare.job.outcome import FAILED, Outcome, failure, finished, write_result
from prepare.job.record import Record
from prepare.job.results import ExampleRun, Results

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

    from prepare.core.forward.example_input import Example
    from prepare.core.utils.progress import Stage
    from prepare.flow.records import Flow
    from prepare.job.settings import Settings
    from prepare.job.spec import JobSpec
    from prepare.pipeline import Pipeline
    from prepare.plan import Plan

# Called with the results so far.
Show = Callable[[Results], None]
_log = logging.getLogger(__name__)


class _Compared(NamedTuple):
    """A prepared model, its pipeline, its reference or the reason why there is none, and the example."""

    pipeline: Pipeline
    reference: nn.Module | str | None
    model: nn.Module
    example: Example | None


@dataclass
class _Course:
    """The stages that a job has completed, and the innermost stage that an error ended."""

    done: list[str] = field(default_factory=list)
    during: str = ""


def run_job(
    spec: JobSpec,
    *,
    stage: Stage = lambda _: nullcontext(),
    show: Show = lambda _: None,
    begun: bool = False,
) -> Outcome:
    """Execute one job and write its record; never raises.

    `stage` is entered with a line on what begins, and may return a function that reports more. `show`
    is called with the results so far: once the model is prepared, and after its verification. `begun`
    says that the caller has called `Record.begin`.
    """
    # A job of a sweep runs in a process of its own, which the command line has not begun.
    with command_line_words():
        return _run_job(spec, stage, show, begun=begun)


def _run_job(spec: JobSpec, stage: Stage, show: Show, *, begun: bool) -> Outcome:
    record = Record(spec.folder)
    start = time.perf_counter()
    course = _Course()
    switch_off_telemetry()
    try:
        if not begun:
            record.begin(spec.job)
            begun = True
        outcome = _run_in_clean_state(spec, record, _logged(stage, course), show)
    except BaseException as error:  # an error of one job may not end the sweep
        outcome = failure(error)
    seconds = round(time.perf_counter() - start, 3)
    outcome = replace(outcome, result=replace(outcome.result, seconds=seconds))
    _log.info("%s after %.1f s, in %s", outcome.result.status, seconds, spec.folder)
    if outcome.result.error:
        _log.error("%s", outcome.result.error)
    if outcome.result.traceback:
        _log.debug("%s", outcome.result.traceback)
    if outcome.results is None:
        result = replace(outcome.result, done=course.done, during=course.during)
        outcome = replace(outcome, result=result)
        if begun:
            _write_failure(spec, record, outcome)
        return write_result(outcome, record)
    try:
        if outcome.code != FAILED or outcome.result.reason == "export":
            spec.pages(outcome, spec.folder)
    except BaseException as error:
        failed = replace(failure(error).result, seconds=seconds)
        outcome = replace(outcome, result=failed, code=failure(error).code)
    return write_result(outcome, record)


def _write_failure(spec: JobSpec, record: Record, outcome: Outcome) -> None:
    """Write what a page says of a job that failed, as far as it can be written."""
    with suppress(BaseException):  # the error of the job matters, not one of its page
        record.write_job(spec.job)
        if outcome.result.done:  # torch was started
            from prepare.core.utils.environment import environment

            record.write_environment(environment())
        spec.pages(outcome, spec.folder)


def _logged(stage: Stage, course: _Course) -> Stage:
    """Return `stage` with messages to the logger, its seconds at level DEBUG, and notes in `course`."""

    @contextmanager
    def logged(what: str) -> Iterator[Any]:
        _log.info("%s", what)
        start = time.perf_counter()
        with stage(what) as tell:
            try:
                yield tell
            except BaseException:
                course.during = course.during or what
                raise
        # A stage of a tuning is repeated; what follows a semicolon changes each time.
        if (name := what.partition(";")[0]) not in course.done:
            course.done.append(name)
        course.during = ""
        _log.debug("%s: done in %.3f s", what, time.perf_counter() - start)

    return logged


def _run_in_clean_state(spec: JobSpec, record: Record, stage: Stage, show: Show) -> Outcome:
    settings = spec.settings()
    # The import of torch swallows an interrupt, and then fails with an unrelated error.
    with stage("starting torch"), held_interrupts():
        from prepare.core.forward.torch_state import isolated
        from prepare.job import analyses
        from prepare.job.build_model import import_plugins
        from prepare.job.load_weights import model_of, save
    _log.debug("configuration: %s", settings)
    with isolated():
        import_plugins(settings.plugins)
        analyses.metric_of(settings)  # a wrong name is an error before anything is built
        if settings.task == "export":
            analyses.check_exporter(settings)
        with stage(f"building {settings.model['_target_']}"):
            model = model_of(settings, spec.build)
        if settings.task == "flow":
            results = _follow(settings, model, stage)
        else:
            build = lambda: model_of(settings, spec.build)  # noqa: E731
            with analyses.kept_compilations(settings) as counts:
                results = _prepare(settings, model, stage, build, show, folder=spec.folder)
            if counts is not None and "compile" in results.pipeline.steps:
                note = f"compiled code in {settings.compile.save}: {counts}"
                results = replace(results, notes=[*results.notes, note])
        try:
            if results.audit is not None and not results.stopped:
                notes = save(settings, model, results.pipeline, stage)
                results = replace(results, notes=[*results.notes, *notes])
            with stage("writing the record"):
                results.write(record, replace(spec.job, seen=results.seen()))
        except (FileError, CheckpointError) as error:
            # A full disk, for example: the terminal still shows the results.
            return replace(failure(error), results=results)
    return finished(results)


def _prepare(
    settings: Settings,
    model: nn.Module,
    stage: Stage,
    build: Callable[[], nn.Module],
    show: Show,
    *,
    folder: Path,
) -> Results:
    from prepare.audit import audit
    from prepare.job import analyses
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
        notes=[*(str(problem) for error in plan.errors for problem in error.problems), *chosen],
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
    given = _Compared(pipeline, reference, model, example)
    if settings.task == "contract":
        show(results)
        return _with_contract(settings, results, given, stage)
    if settings.task == "export":
        show(results)
        return _with_export(settings, results, given, stage, show, folder=folder)
    if unchanged:
        return replace(results, unchanged=True)
    show(results)
    results = _with_comparison(settings, results, given, stage, show, took=seconds)
    if settings.task == "patch" and not results.stopped:
        with stage("writing the patch"):
            patch = analyses.patch_of(settings, model, formatted, results.verification)
        results = replace(results, patch=patch)
    return results


def _with_reduction(
    settings: Settings, results: Results, given: _Compared, stage: Stage
) -> Results:
    """Return the results with the script of the first module that is wrong by itself, or a note."""
    from prepare.job import analyses

    with stage("reducing the first wrong module to a script"):
        reduction = analyses.reduction_of(settings, results.verification, given)
    if reduction is None:
        text = "no module of torch is wrong by itself on inputs of this size, mean and deviation"
        return replace(results, notes=[*results.notes, text])
    return replace(results, reduction=reduction)


def _with_contract(settings: Settings, results: Results, given: _Compared, stage: Stage) -> Results:
    """Return the results with the check of the contract, or with a note that it was written."""
    from prepare.job import analyses

    with stage("checking the layout contract"):
        contract = analyses.contract_of(settings, *given)
    if settings.contract.update:
        text = f"the contract is written to {settings.contract.file}"
        return replace(results, notes=[*results.notes, text])
    return replace(results, contract=contract)


def _with_export(
    settings: Settings,
    results: Results,
    given: _Compared,
    stage: Stage,
    show: Show,
    *,
    folder: Path,
) -> Results:
    """Return the results with the verification and, unless that failed, with the export."""
    from prepare.job import analyses

    # The artefact is timed together with both models.
    untimed = replace(settings, bench="none")
    results = _with_comparison(untimed, results, given, stage, show, took=0.0)
    verification = results.verification
    if results.stopped or (verification is not None and verification.status == "fail"):
        return results
    try:
        return replace(
            results, export=analyses.export_of(settings, *given, folder=folder, progress=stage)
        )
    except KeyboardInterrupt as stop:
        stopped = f"{str(stop) or 'stopped by Ctrl-C'}; not done: the export"
        return replace(results, stopped=stopped)


def _with_comparison(
    settings: Settings,
    results: Results,
    given: _Compared,
    stage: Stage,
    show: Show,
    *,
    took: float,
) -> Results:
    """Return the results with the verification and the timing against the unprepared model."""
    from prepare.job import analyses

    example = given.example
    try:
        with _if(settings.verify != "none" and example, stage, "verifying outputs and gradients"):
            verification = analyses.verification_of(settings, *given)
        results = replace(results, verification=verification)
        show(results)
        if settings.task == "reduce":
            return _with_reduction(settings, results, given, stage)
        text = "timing it against the unprepared model"
        with _if(settings.bench != "none" and example, stage, text) as tell:
            bench = analyses.bench_of(settings, *given, took=took, tell=tell)
    except KeyboardInterrupt as stop:
        # What was done until now is worth its record.
        missing = "verification and timing" if results.verification is None else "timing"
        stopped = f"{str(stop) or 'stopped by Ctrl-C'}; not done: {missing}"
        return replace(results, stopped=stopped)
    return replace(results, bench=bench)


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
    with _if("keep_layout" in declared.steps and example, stage, "choosing the calls to replace"):
        pipeline, notes = with_calls(settings, model, declared, example, build)
    if pipeline is not declared:
        plan = plan_of(settings, model, pipeline)
    return pipeline, plan, notes


def _flow(
    settings: Settings,
    pipeline: Pipeline,
    model: nn.Module,
    formatted: Example | None,
    stage: Stage,
) -> tuple[Flow | None, Flow | None]:
    """Return the layout flow of the prepared model, and the one without its repairs."""
    from prepare.job import analyses

    with _if(settings.flow != "none" and formatted, stage, "following the layout of activations"):
        flow = analyses.flow_of(settings, model, formatted)
        flow = analyses.with_remedy(settings, pipeline, model, formatted, flow)
        return flow, flow and analyses.flow_without_repairs(settings, pipeline, model, formatted)


def _if(needed: object, stage: Stage, what: str) -> AbstractContextManager[Any]:
    """Return the context of a stage; one that shows nothing if there is nothing to do."""
    return stage(what) if needed else nullcontext()


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
    word = "channels_last" if ranks == {2} else "channels_last_3d" if ranks == {3} else "all"
    text = f"no memfmt chosen: nothing was asked of convolutions; choose memfmt={word}"
    return [text]


def _errors(plan: Plan, settings: Settings) -> list[ConfigError]:
    """Return the errors that stop a job: without `strict` only those known to give wrong numbers."""
    return [e for e in plan.errors if settings.strict or isinstance(e, KnownIssueError)]


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


def _follow(settings: Settings, model: nn.Module, stage: Stage) -> Results:
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
