"""One run: builds the model, prepares it, tries it, audits it, and leaves a record, whatever happens."""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from prepare.core.utils.signals import held_interrupts
from prepare.core.utils.telemetry import switch_off_telemetry
from prepare.errors import (
    ConfigError,
    KnownIssueError,
    Problem,
)
from prepare.job.outcome import Facts, Outcome, failure, finished, write_result
from prepare.job.record import Record

if TYPE_CHECKING:
    from torch import nn

    from prepare.audit import Audit
    from prepare.bench.records import Bench
    from prepare.core.forward.run_example import Forward
    from prepare.core.utils.progress import Stage
    from prepare.flow.records import Flow
    from prepare.job.record import Job
    from prepare.job.settings import Settings
    from prepare.job.spec import JobSpec
    from prepare.pipeline import Pipeline
    from prepare.plan import Plan
    from prepare.tune.records import Tuning
    from prepare.verify.records import Verification


def run_job(
    spec: JobSpec, *, stage: Stage = lambda _: nullcontext(), begun: bool = False
) -> Outcome:
    """Execute one job and write its record; never raises.

    `stage` is entered with a line on what begins, and may return a function that reports more;
    `begun` says that the caller has called `Record.begin`.
    """
    record = Record(spec.folder)
    start = time.perf_counter()
    switch_off_telemetry()
    try:
        if not begun:
            record.begin(spec.job)
        outcome = _run_in_clean_state(spec, record, stage)
    except BaseException as error:  # one job may not take the others of a sweep along
        outcome = failure(error)
    seconds = round(time.perf_counter() - start, 3)
    outcome = replace(outcome, result=replace(outcome.result, seconds=seconds))
    try:
        spec.pages(outcome, spec.folder)
    except BaseException as error:
        failed = failure(error)
        outcome = replace(failed, result=replace(failed.result, seconds=seconds))
    return write_result(outcome, record)


def _run_in_clean_state(spec: JobSpec, record: Record, stage: Stage) -> Outcome:
    settings = spec.settings()
    # The import of torch swallows an interrupt, and then fails with an unrelated error.
    with stage("starting torch"), held_interrupts():
        from prepare.core.forward.torch_state import isolated
        from prepare.job.build_model import import_plugins
        from prepare.job.load_weights import model_of
    with isolated():
        import_plugins(settings.plugins)
        with stage(f"building {settings.model['_target_']}"):
            model = model_of(settings, spec.build)
        facts, made = (_look if settings.task == "flow" else _prepare)(settings, model, stage)
        with stage("writing the record"):
            made.write(record, replace(spec.job, seen=_seen(facts)))
    return finished(facts)


@dataclass(frozen=True)
class _Made:
    """What is to be written."""

    pipeline: Pipeline
    plan: Plan
    audit: Audit | None = None
    flow: Flow | None = None
    flow_before: Flow | None = None
    verification: Verification | None = None
    bench: Bench | None = None
    tuning: Tuning | None = None

    def write(self, record: Record, job: Job) -> None:
        from prepare.core.utils.environment import environment

        record.write_plan(self.plan)
        if self.audit:
            record.write_prepared(self.pipeline, self.audit)
        if self.flow:
            record.write_flow(self.flow)
        if self.flow_before:
            record.write_flow_before(self.flow_before)
        if self.verification:
            record.write_verification(self.verification)
        if self.bench:
            record.write_bench(self.bench)
        if self.tuning:
            record.write_tuning(self.tuning)
        record.write_environment(environment())
        record.write_job(job)


def _prepare(settings: Settings, model: nn.Module, stage: Stage) -> tuple[Facts, _Made]:
    from prepare.audit import audit
    from prepare.core.forward.compiled import contains_compiled
    from prepare.core.forward.run_example import run_example
    from prepare.job import analyses
    from prepare.job import load_weights as weights
    from prepare.pipeline import Pipeline

    pipeline = Pipeline.from_config(settings.steps)
    with stage("planning"):
        plan = weights.plan_of(settings, model, pipeline)
    if errors := _errors(plan, settings):
        raise _as_one(errors)
    tuning = analyses.tuning_of(settings, model, stage) if settings.task == "tune" else None
    if tuning:
        pipeline = tuning.pipeline
        plan = pipeline.plan(model, known_issues=settings.known_issues)
    facts = Facts(
        model=type(model).__name__,
        steps=pipeline.to_config(),
        plan=plan.summary(),
        problems=[str(problem) for error in plan.errors for problem in error.problems],
        warnings=[str(warning) for warning in plan.warnings],
    )
    if settings.task == "plan":
        return replace(facts, changes=_changes(plan)), _Made(pipeline, plan)
    reference = analyses.reference_of(settings, model)
    with stage("preparing"):
        weights.read_into(settings, model, pipeline)
        # What is known of it has been said with the plan.
        pipeline.apply(model, strict=settings.strict, known_issues="ignore")
    given = analyses.example_of(settings)
    example = given and analyses.formatted(given, pipeline)
    took = 0.0
    if example and contains_compiled(model):
        with stage("compiling at the first call"):
            run_example(model, example)
    if example:
        with stage("running the example input"):
            start = time.perf_counter()
            forward = run_example(model, example)
            took = time.perf_counter() - start
        facts = replace(facts, given=forward.given, gave=forward.gave, seen=_gave(forward, plan))
    with stage("following the layout of activations"):
        flow = analyses.flow_of(settings, model, example)
        before = flow and analyses.flow_without_repairs(pipeline, model, example)
    with stage("verifying outputs and gradients"):
        verification = analyses.verification_of(settings, pipeline, reference, model, given)
    with stage("timing it against the unprepared model") as tell:
        bench = analyses.bench_of(settings, pipeline, reference, model, given, took=took, tell=tell)
    with stage("auditing"):
        audited = audit(model, plan=plan)
    notes = weights.save(settings, model, pipeline, stage)
    facts = replace(facts, problems=[*facts.problems, *notes])
    notable = [row._asdict() for row in audited.rows if row.status in ("ineffective", "skipped")]
    facts = replace(facts, audit=audited.summary, notable=notable)
    facts = replace(facts, flow=flow, flow_before=before, verification=verification, bench=bench)
    made = _Made(pipeline, plan, audited, flow, before, verification, bench, tuning)
    return replace(facts, tuning=tuning), made


def _errors(plan: Plan, settings: Settings) -> list[ConfigError]:
    """What stops a run: without `strict` only what is known to give wrong numbers."""
    return [e for e in plan.errors if settings.strict or isinstance(e, KnownIssueError)]


def _look(settings: Settings, model: nn.Module, stage: Stage) -> tuple[Facts, _Made]:
    """The layout flow of a model that nothing is done to."""
    from prepare.job import analyses
    from prepare.pipeline import Pipeline

    unprepared = Pipeline([])
    given = analyses.example_of(settings)
    if not given:
        remedy = "give one with input.shape=[...]"
        raise ConfigError("input", "task=flow needs an example input", remedy)
    plan = unprepared.plan(model)
    with stage("following the layout of activations"):
        flow = analyses.flow_of(settings, model, analyses.formatted(given, unprepared))
    steps = ", ".join(name for name in settings.steps if name != "device")
    problems = [f"{steps}: not applied, for task=flow looks at the model as it is"] if steps else []
    facts = Facts(type(model).__name__, {}, plan.summary(), problems, flow=flow)
    return facts, _Made(unprepared, plan, None, flow)


def _as_one(errors: list[ConfigError]) -> ConfigError:
    kinds = {type(error) for error in errors}
    problems: list[Problem] = [problem for error in errors for problem in error.problems]
    return (kinds.pop() if len(kinds) == 1 else ConfigError).of(problems)


def _gave(forward: Forward, plan: Plan) -> list[dict[str, Any]]:
    from prepare.core.forward.conv_layouts import seen

    asked = {tensor.wants.get("memory_format") for tensor in plan.tensors} - {None}
    return [asdict(one) for one in seen(forward.calls, tuple(sorted(asked)))]


def _seen(facts: Facts) -> dict[str, Any] | None:
    if facts.given is None:
        return None
    return {"given": facts.given, "gave": facts.gave, "convolutions": facts.seen}


def _changes(plan: Plan) -> list[dict[str, Any]]:
    """What would change, tensor by tensor and side by side, in words."""
    return [
        {
            "tensor": f"{tensor.module}.{tensor.tensor}" if tensor.module else tensor.tensor,
            "shape": tensor.shape,
            "sides": [
                (side, old, new)
                for side, old, new in zip(tensor.old._fields, tensor.old, tensor.new, strict=True)
                if old != new
            ],
            "steps": tensor.changing,
        }
        for tensor in plan.tensors
        if tensor.changes
    ]
