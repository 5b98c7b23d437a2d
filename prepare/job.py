"""One run: builds the model, prepares it, tries it, audits it, and leaves a record, whatever happens."""

from __future__ import annotations

import importlib
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from prepare.errors import (
    ConfigError,
    FileError,
    ModelError,
    NothingMatchesError,
    PrepareError,
    Problem,
    RefusedError,
    StepError,
)
from prepare.record import Job, Record, Result
from prepare.settings import Settings

if TYPE_CHECKING:
    from torch import nn

    from prepare.audit import Audit
    from prepare.forward import Forward
    from prepare.pipeline import Pipeline
    from prepare.plan import Plan

DONE, FAILED, WRONG, INTERRUPTED = 0, 1, 2, 130
_EXIT_CODES = {"ok": DONE, "interrupted": INTERRUPTED}
_LOW = ("float16", "bfloat16")

Stage = Callable[[str], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Facts:
    """What a terminal shows of a finished run, as plain data."""

    model: str
    steps: dict[str, dict[str, Any]]
    plan: dict[str, Any]
    problems: list[str]
    changes: list[dict[str, Any]] = field(default_factory=list)
    audit: dict[str, Any] | None = None
    notable: list[dict[str, Any]] = field(default_factory=list)
    given: str | None = None
    gave: str | None = None
    seen: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Outcome:
    """How a run ended, the code that a single run exits with, and the facts where it went well."""

    result: Result
    code: int
    facts: Facts | None = None


def run(
    settings: Callable[[], Settings],
    record: Record,
    *,
    build: Callable[[Mapping[str, Any]], Any],
    job: Job,
    stage: Stage = lambda _: nullcontext(),
) -> Outcome:
    """Does one run and writes its record; never raises.

    `settings` gives the checked configuration, or raises; `build` instantiates a model's
    configuration; `stage` is entered with what is going on, for whoever watches.
    """
    start = time.perf_counter()
    try:
        record.clear()
        if job.sweep is not None:
            record.write_job(job)
        outcome = _isolated_run(settings, record, build=build, job=job, stage=stage)
    except BaseException as error:  # noqa: BLE001  one job may not take the others of a sweep along
        outcome = failure(error)
    seconds = round(time.perf_counter() - start, 3)
    outcome = replace(outcome, result=replace(outcome.result, seconds=seconds))
    return _write_result(outcome, record)


def failure(error: BaseException) -> Outcome:
    """The outcome of a run that raised."""
    trace = "".join(traceback.format_exception(error))
    said = str(error).strip()
    line = f"{type(error).__name__}: {said}" if said else type(error).__name__
    if isinstance(error, KeyboardInterrupt):
        return Outcome(Result("interrupted", "interrupted", "stopped by Ctrl-C"), INTERRUPTED)
    if isinstance(error, NothingMatchesError):
        return Outcome(Result("no_effect", "no effect", said), WRONG)
    if isinstance(error, (ConfigError, RefusedError)):
        reason = "refused" if isinstance(error, RefusedError) else "configuration"
        return Outcome(Result("failed", reason, said), WRONG)
    if isinstance(error, SystemExit):
        return Outcome(
            Result("failed", "exit", f"the job called sys.exit({error.code!r})", trace), 1
        )
    if _is_out_of_memory(error):
        return Outcome(Result("failed", "oom", f"out of memory: {line}", trace), FAILED)
    reasons = {ModelError: "model", StepError: "step", FileError: "file"}
    reason = next((word for kind, word in reasons.items() if isinstance(error, kind)), "error")
    return Outcome(
        Result("failed", reason, said if isinstance(error, PrepareError) else line, trace), FAILED
    )


def _isolated_run(
    settings: Callable[[], Settings],
    record: Record,
    *,
    build: Callable[[Mapping[str, Any]], Any],
    job: Job,
    stage: Stage,
) -> Outcome:
    wanted = settings()
    with stage("starting torch"):
        from prepare.isolate import isolated
    with isolated():
        _import_plugins(wanted.plugins)
        with stage(f"building {wanted.model['_target_']}"):
            model = _build(wanted, build)
        facts, made = _prepare(wanted, model, stage)
        with stage("writing the record"):
            made.write(record, replace(job, seen=_seen(facts)))
    return Outcome(Result("ok"), DONE, facts)


@dataclass(frozen=True)
class _Made:
    """What is to be written."""

    pipeline: Pipeline
    plan: Plan
    audit: Audit | None = None

    def write(self, record: Record, job: Job) -> None:
        from prepare.environment import environment

        record.write_plan(self.plan)
        if self.audit:
            record.write_prepared(self.pipeline, self.audit)
        record.write_environment(environment())
        record.write_job(job)


def _import_plugins(names: Iterable[str]) -> None:
    for index, name in enumerate(names):
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            wrong = f"there is no module {error.name!r}"
            remedy = "install it, or start in the folder that holds it"
            raise ConfigError(f"plugins[{index}]", wrong, remedy) from error


def _build(settings: Settings, build: Callable[[Mapping[str, Any]], Any]) -> nn.Module:
    import torch
    from torch import nn

    from prepare.target import check_targets

    check_targets(settings.model)
    target = settings.model["_target_"]
    torch.manual_seed(settings.seed)
    try:
        model = build(settings.model)
    except Exception as error:
        cause = error.__cause__ or error
        if _is_out_of_memory(cause):
            raise cause from None
        said = str(cause).strip().split("\n")[0]
        wrong = f"building {target} raised {type(cause).__name__}: {said}"
        raise ModelError("model", wrong) from error
    if not isinstance(model, nn.Module):
        wrong = f"{target} gave an object of type {type(model).__name__}, which is no torch.nn.Module"
        raise ConfigError("model._target_", wrong, "name a class or function that gives a model")
    if settings.choices.get("precision") == "float32" and "half" not in settings.steps:
        _require_float32(model)
    return model.train(settings.mode == "train")


def _require_float32(model: nn.Module) -> None:
    """precision=float32 adds no step, so a model that is something else would stay so unnoticed."""
    from prepare.tensors import named_tensors

    low = {
        id(place.tensor): f"{place.path} ({str(place.tensor.dtype).removeprefix('torch.')})"
        for place in named_tensors(model)
        if str(place.tensor.dtype).removeprefix("torch.") in _LOW
    }
    if low:
        first = ", ".join(list(low.values())[:3])
        wrong = (
            f"float32 adds no step, and the model holds {len(low)} tensors that are not: {first}"
        )
        wrong += ", ..." if len(low) > 3 else ""
        remedy = (
            "build it in float32, or choose precision=bfloat16 or half; ~precision drops this check"
        )
        raise ConfigError("precision", wrong, remedy)


def _prepare(settings: Settings, model: nn.Module, stage: Stage) -> tuple[Facts, _Made]:
    from prepare.audit import audit
    from prepare.pipeline import Pipeline

    pipeline = Pipeline.from_config(settings.steps)
    with stage("planning"):
        plan = pipeline.plan(model)
    if settings.strict and plan.errors:
        raise _as_one(plan.errors)
    facts = Facts(
        model=type(model).__name__,
        steps=pipeline.to_config(),
        plan=plan.summary(),
        problems=[str(problem) for error in plan.errors for problem in error.problems],
    )
    if settings.task == "plan":
        return replace(facts, changes=_changes(plan)), _Made(pipeline, plan)
    with stage("preparing"):
        pipeline.apply(model, strict=settings.strict)
    forward = _try(settings, pipeline, model, stage)
    with stage("auditing"):
        audited = audit(model, plan=plan)
    if forward:
        facts = replace(facts, given=forward.given, gave=forward.gave, seen=_gave(forward, plan))
    notable = [row._asdict() for row in audited.rows if row.status in ("ineffective", "skipped")]
    facts = replace(facts, audit=audited.summary, notable=notable)
    return facts, _Made(pipeline, plan, audited)


def _as_one(errors: list[ConfigError]) -> ConfigError:
    nothing = all(isinstance(error, NothingMatchesError) for error in errors)
    problems: list[Problem] = [problem for error in errors for problem in error.problems]
    return (NothingMatchesError if nothing else ConfigError).of(problems)


def _try(settings: Settings, pipeline: Pipeline, model: nn.Module, stage: Stage) -> Forward | None:
    """One forward with the example, formatted as the pipeline's steps say; None without an example."""
    from prepare.example import build_example
    from prepare.forward import run_example
    from prepare.steps.input_format import InputFormat

    example = build_example(settings.input, settings.seed)
    if not example:
        return None
    formats = next(
        (s for s in pipeline.steps.values() if isinstance(s, InputFormat)), InputFormat()
    )
    formats = formats.bind(pipeline.steps.values())
    example = replace(
        example, args=formats.format(example.args), kwargs=formats.format(example.kwargs)
    )
    with stage("running the example input"):
        return run_example(model, example)


def _gave(forward: Forward, plan: Plan) -> list[dict[str, Any]]:
    from prepare.effect import seen

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
            "steps": tensor.steps,
        }
        for tensor in plan.tensors
        if tensor.changes
    ]


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError):
        return True
    words = ("out of memory", "can't allocate memory", "not enough memory")
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in words)


def _write_result(outcome: Outcome, record: Record) -> Outcome:
    try:
        record.write_result(outcome.result)
    except FileError as error:
        if outcome.code != DONE:
            return outcome
        failed = replace(failure(error).result, seconds=outcome.result.seconds)
        with suppress(FileError):
            record.write_result(failed)
        return Outcome(failed, FAILED)
    return outcome
