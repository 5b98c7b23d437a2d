"""Ask torch's own bisector which part of the compiler makes a compiled model wrong."""

from __future__ import annotations

import io
import math
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from prepare.core.forward.call import call_of
from prepare.core.forward.compiled import eager_if_compiled
from prepare.core.utils.process_state import PROCESS_STATE, ignored_warnings
from prepare.stages.verify.execution.runner import ModelPair
from prepare.stages.verify.execution.single_run import compiled_stand_in, run_model, same_stand_in
from prepare.stages.verify.inputs import user_call
from prepare.stages.verify.tolerance import rounding_floor
from prepare.steps.compile import Compile

if TYPE_CHECKING:
    from prepare.pipeline import Pipeline
    from prepare.stages.verify.execution.single_run import RunResult

# A difference that is smaller by more than this factor has another cause, such as rounding.
_SMALLER = 5.0
_FIELDS = ("outputs", "inputs", "parameters")


def blame_compiler(
    model: nn.Module, batch: Any, *, pipeline: Pipeline, training: bool, seconds: float = 60.0
) -> str:
    """Say in one sentence which part of torch's compiler makes a compiled model wrong, or raise.

    The model is compiled again and again with more of the compiler switched on, by
    `torch._inductor.compiler_bisector`: its backends, then the passes, decompositions and lowerings of the
    first backend that is wrong. Compared are the outputs, and with `training` the gradients, with those of
    the model without its compiler.

    Args:
        model: the model that the step `compile` of `pipeline` compiled; it is compiled anew at the end.
        batch: a tensor, a tuple of positional or a mapping of named arguments, or an Example.
        pipeline: the pipeline that prepared it; it formats the batch.
        training: run a backward too.
        seconds: no compilation begins after this time.
    """
    try:
        from torch._inductor.compiler_bisector import CompilerBisector
    except ImportError:
        return f"torch {torch.__version__} cannot name the part of the compiler; 2.6 and newer can"
    (step,) = (each for each in pipeline.steps.values() if isinstance(each, Compile))
    call = user_call(call_of(batch).map(Tensor.detach), model, pipeline)
    flags = {name: module.training for name, module in model.named_modules()}
    run = partial(run_model, model, call, flags=flags, backward=training)
    with eager_if_compiled(model):
        expected = run(same_stand_in)
    end = time.perf_counter() + seconds

    def difference() -> float | None:
        """Compile and run the model; return how far off it is, None if it raises."""
        if time.perf_counter() > end:
            raise TimeoutError
        _compiled_anew(model, step)
        try:
            return _difference(expected, run(compiled_stand_in, compiled=True))
        except Exception:
            return None

    models = ModelPair(model, model)
    with PROCESS_STATE, ignored_warnings(), redirect_stdout(io.StringIO()):
        try:
            first = difference()
            if first is not None and first <= rounding_floor(models.dtype, models.depth):
                return (
                    "the compiled model differs from the same without its compiler by rounding only"
                )
            found = CompilerBisector.do_bisect(partial(_is_right, difference, first))
        except TimeoutError:
            return f"the part of the compiler was not found within {seconds:.0f} s; raise verify.seconds"
        finally:
            _compiled_anew(model, step)
    if found is None:
        return f"torch's own backends are right; only the backend {step.backend} is wrong"
    number = "" if found.subsystem is None else f": {found.subsystem}"
    number += f" {found.bisect_number}" if found.bisect_number else ""
    what = f" ({found.debug_info})" if found.debug_info not in (None, found.subsystem) else ""
    return f"torch's bisector blames the backend {found.backend}{number}{what}"


def _compiled_anew(model: nn.Module, step: Compile) -> None:
    Compile.undo(model)
    torch._dynamo.reset()
    step.act(model)


def _is_right(difference: Callable[[], float | None], first: float | None) -> bool:
    """Return whether the model, compiled in part, does not have the fault that it had at first."""
    found = difference()
    if found is None or first is None:
        return found is not first
    return found < first / _SMALLER


def _difference(expected: RunResult, found: RunResult) -> float:
    """Return the largest difference of two runs, relative to the largest number of its kind."""
    worst = 0.0
    for field in _FIELDS:
        before, after = getattr(expected, field), getattr(found, field)
        pairs = [(t.double(), after[name].double()) for name, t in before.items() if t is not None]
        scale = max((float(t.abs().max()) for t, _ in pairs if t.numel()), default=0.0)
        off = max((float((t - other).abs().max()) for t, other in pairs if t.numel()), default=0.0)
        worst = max(worst, math.inf if math.isnan(off) else off / (scale or 1.0))
    return worst
