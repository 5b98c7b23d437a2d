"""Time the prepared model against the unprepared one: the cases and the budget of each level."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from prepare.core.forward.call import Call, call_of
from prepare.core.forward.torch_state import Amp, device_of
from prepare.core.utils.text import first_line, plural
from prepare.core.utils.user_code import is_out_of_memory
from prepare.errors import PrepareError
from prepare.pipeline import Pipeline
from prepare.stages.bench.compare_variants import compare
from prepare.stages.bench.records import PREPARED, UNPREPARED, Bench, Case, Progress
from prepare.stages.verify.inputs import format_call, resized

if TYPE_CHECKING:
    from torch import nn

    from prepare.core.forward.example_input import Example
    from prepare.stages.stage import Level, Mode

INFERENCE, ONE_SAMPLE, TRAINING = "inference", "inference of one sample", "training step"
# Seconds for each case: a `full` case stops there, a `short` one once its verdict is settled. A `short` case
# ends within 10 s of its start: its last call may exceed the budget by what it took longer than expected.
BUDGET = {"short": 9.0, "full": 60.0}
# The longest time of a short case, for slow calls. It makes about `_CALLS` calls at least: three of each
# variant, and three rounds of three, with a margin.
LONGEST, _CALLS = 120.0, 18
PRECISION = {"short": 0.03, "full": 0.01}
# The time of a training step in forwards, roughly.
_FORWARDS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Models:
    """The unprepared model, or the reason why it cannot be used; the prepared model and its pipeline."""

    unprepared: nn.Module | str
    prepared: nn.Module
    pipeline: Pipeline


def time_models(
    models: Models,
    example: Any,
    *,
    level: Level,
    mode: Mode,
    took: float = 0.0,
    seconds: float | None = None,
    amp: Amp = "none",
    tell: Callable[[str], object] = lambda _: None,
) -> Bench:
    """Time the prepared model against the unprepared one, which is moved to the device of the pipeline.

    Args:
        models: apart from that move, both are left unchanged.
        example: the arguments of the unprepared model, an Example or a Call; None for none.
        level: `short` times inference or, in mode `train`, a training step, until the verdict is settled,
            within 10 seconds; slow calls for 8 rounds, within 120 seconds. If three rounds do not fit into
            that, nothing is compared, and the reason says so. `full` times inference, inference of one
            sample and a training step for a minute each, however long a call takes.
        mode: the use of the model; its case comes first.
        took: the time in seconds of a forward of the prepared model, for a first estimate.
        seconds: the time for each case in place of the level's own; with it no call is too long.
        amp: the autocast of the forwards of both.
        tell: called at intervals with a line on the progress.
    """
    start = time.perf_counter()
    first = TRAINING if mode == "train" else INFERENCE
    reason = _reason(models, example)
    if level == "short" and seconds is None and not reason:
        reason = _too_long(first, _takes(models, first, took))
    if reason or not example:
        cases: tuple[Case, ...] = (Case(what=first, reason=reason),)
    else:
        case = partial(_case, models, level=level, seconds=seconds, amp=amp, tell=tell)
        cases = tuple(case(*each) for each in _calls(call_of(example), level, first).items())
    return Bench(level=level, mode=mode, seconds=time.perf_counter() - start, cases=cases)


def _reason(models: Models, example: Example | Call | None) -> str:
    """Return why nothing can be compared; empty if it can."""
    if not example:
        return "there is no example input; give one with input.shape=[...]"
    if isinstance(models.unprepared, str):
        return models.unprepared
    try:
        _device_steps(models).apply(models.unprepared, known_issues="ignore")
    except Exception as error:
        return _expected(error)
    return ""


def _takes(models: Models, what: str, took: float) -> float:
    """Return the seconds that a call takes by the first forward; 0 if that says nothing about others."""
    device = device_of([models.prepared]).type
    # A first forward may compile, or load libraries on a GPU.
    if device != "cpu" or any(step.phase == "runtime" for step in models.pipeline.steps.values()):
        return 0.0
    return took * (_FORWARDS if what == TRAINING else 1)


def time_limit(budget: float, call: float) -> float:
    """Return the most seconds of a short case whose call takes `call` seconds; 0 if it is not timed."""
    return 0.0 if _too_long("", call) else max(budget, _CALLS * call)


def _too_long(what: str, seconds: float) -> str:
    """Return why a short case whose call takes `seconds` is not timed; empty if three rounds fit."""
    if _CALLS * seconds <= LONGEST:
        return ""
    limit = f"within {LONGEST:.0f} s; raise bench.seconds"
    return f"{what} takes about {seconds:.0f} s, too long for a comparison {limit}"


def _calls(call: Call, level: Level, first: str) -> dict[str, Call]:
    if level != "full":
        return {first: call}
    one = resized(call, 1)
    single = {} if one is call else {ONE_SAMPLE: one}
    return {first: call, INFERENCE: call} | single | {TRAINING: call}


def _case(
    models: Models,
    what: str,
    call: Call,
    *,
    level: Level,
    seconds: float | None,
    amp: Amp,
    tell: Callable[[str], object],
) -> Case:
    """Return the case, timed for `seconds`, or as long as the level says."""
    unprepared = models.unprepared
    assert not isinstance(unprepared, str)  # else no case is timed
    variants = {
        UNPREPARED: (unprepared, _device_steps(models)),
        PREPARED: (models.prepared, models.pipeline),
    }
    try:
        comparison = compare(
            {name: model for name, (model, _) in variants.items()},
            call,
            train=what == TRAINING,
            budget=seconds or BUDGET[level],
            within_budget=level == "short",
            longest=LONGEST if level == "short" and seconds is None else None,
            settle=level == "short",
            amp=amp,
            precision=PRECISION[level],
            format={
                name: partial(format_call, prepared=model, pipeline=pipeline)
                for name, (model, pipeline) in variants.items()
            },
            progress=lambda now: tell(f"timing {what}: {_progress_text(now)}"),
        )
    except Exception as error:
        return Case(what=what, reason=_expected(error))
    return Case(what=what, comparison=comparison)


def _device_steps(models: Models) -> Pipeline:
    """Return a pipeline of the device step only, which the unprepared model needs for the comparison."""
    return Pipeline([step for step in models.pipeline.steps.values() if step.name == "device"])


def _progress_text(now: Progress) -> str:
    if not now.rounds:
        return now.doing
    is_known = now.precision is not None and now.precision < 0.3
    known = f", known to ±{now.precision:.1%}" if is_known else ""
    left = max(0.0, now.budget - now.seconds)
    return f"{plural(now.rounds, 'round')}{known}, at most {left:.0f} s left"


def _expected(error: Exception) -> str:
    """Return the text of an error that the model may have caused; raise any other error."""
    if isinstance(error, PrepareError):
        problem = error.problems[0]
        more_time = f"{problem.wrong}; raise bench.seconds"
        return more_time if problem.where == "budget" else str(problem)
    if is_out_of_memory(error):
        return f"out of memory: {first_line(error)}"
    raise error
