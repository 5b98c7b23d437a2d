"""Time the prepared model against the unprepared one, for as long as it takes or the user says."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from prepare.core.forward.call import call_of
from prepare.core.utils.packages import is_out_of_memory
from prepare.core.utils.text import first_line
from prepare.errors import PrepareError
from prepare.pipeline import Pipeline
from prepare.stages.bench.compare_variants import compare
from prepare.stages.bench.records import PREPARED, UNPREPARED, Comparison
from prepare.stages.verify.runs import format_call

if TYPE_CHECKING:
    from torch import nn

    from prepare.core.forward.torch_state import Amp
    from prepare.stages.stage import Mode

# Seconds: a comparison stops as soon as its verdict is clear. For slow calls it may take longer.
BUDGET, LONGEST = 3.0, 120.0


def time_models(
    unprepared: nn.Module | str,
    prepared: nn.Module,
    pipeline: Pipeline,
    example: Any,
    *,
    mode: Mode,
    seconds: float | None = None,
    amp: Amp = "none",
    tell: Callable[[str], object] = lambda _: None,
) -> Comparison:
    """Time the prepared model against the unprepared one, which is moved to the device of the pipeline.

    Args:
        unprepared: the model, or the reason why it cannot be used.
        prepared: the other one. Apart from that move, both are left unchanged.
        pipeline: that of the prepared model, which formats its inputs.
        example: the arguments of the unprepared model, an Example or a Call; None for none.
        mode: `eval` times inference, `train` a training step.
        seconds: the time limit; by default 3 seconds, and 120 for 8 rounds of slow calls. It stops when the
            verdict is clear, or cannot become clear. If three rounds do not fit, nothing is compared, and
            the reason says so.
        amp: the autocast of the forwards of both.
        tell: called at intervals with a line on the progress.
    """
    start, train = time.perf_counter(), mode == "train"
    reason = unprepared if isinstance(unprepared, str) else ""
    if not example:
        reason = "there is no example input; give one with input.shape=[...]"
    # The unprepared model needs nothing but its device.
    steps = (step for step in pipeline.steps.values() if step.name == "device")
    pipelines = {UNPREPARED: Pipeline(steps), PREPARED: pipeline}
    if not isinstance(unprepared, str) and not reason:
        models = {UNPREPARED: unprepared, PREPARED: prepared}
        try:
            pipelines[UNPREPARED].apply(unprepared, known_issues="ignore")
            return compare(
                models,
                call_of(example),
                train=train,
                budget=seconds or BUDGET,
                longest=seconds or LONGEST,
                amp=amp,
                precision=None,
                format={
                    name: partial(format_call, prepared=model, pipeline=pipelines[name])
                    for name, model in models.items()
                },
                progress=lambda now: tell(f"timing: {now}"),
            )
        except Exception as error:
            reason = _expected(error)
    seconds, settings = time.perf_counter() - start, {"train": train}
    return Comparison(rows=(), seconds=seconds, settings=settings, environment={}, reason=reason)


def _expected(error: Exception) -> str:
    """Return the text of an error that the model may have caused; raise any other error."""
    if isinstance(error, PrepareError):
        problem = error.problems[0]
        more_time = f"{problem.wrong}; raise bench.seconds"
        return more_time if problem.where == "budget" else str(problem)
    if is_out_of_memory(error):
        return f"out of memory: {first_line(error)}"
    raise error
