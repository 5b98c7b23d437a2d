"""Verify a prepared model: run all checks, and draw the conclusion."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from prepare.core.forward.autocast import Amp, autocast, device_of, read_amp
from prepare.core.forward.call import call_of
from prepare.core.forward.compiled import contains_compiled, eager_if_compiled
from prepare.core.forward.stand_ins import lazy_parameter
from prepare.core.model.devices import free_memory
from prepare.core.model.threads import with_threads
from prepare.core.utils.machine import usable_cores
from prepare.core.utils.suggest import choose
from prepare.errors import RefusedError
from prepare.stages.verify.compare_case import CaseComparison
from prepare.stages.verify.execution.budget import Budget, Cost, estimate
from prepare.stages.verify.execution.determinism import training_flags
from prepare.stages.verify.execution.runner import ExactRuns, ModelPair, raise_if_out_of_memory
from prepare.stages.verify.execution.single_run import run_model, same_stand_in
from prepare.stages.verify.inputs import VerificationCase, cases_for, resized
from prepare.stages.verify.static_checks import (
    cast_losses,
    check_casts,
    check_flags,
    check_layout,
    check_values,
    rewritten_modules,
)
from prepare.stages.verify.verdict import conclude

if TYPE_CHECKING:
    from prepare.pipeline import Pipeline
    from prepare.stages.stage import Mode
    from prepare.stages.verify.records import Verification

Level = Literal["short", "full"]
SECONDS = {"short": 30.0, "full": 600.0}
# The memory limit is this part of the free memory; the bytes where the system does not report it.
_FREE_PART, _UNKNOWN_MEMORY = 0.5, 4 * 2**30

# A model whose runs take long gets the time of so many runs, up to a limit in seconds.
_STEPS, _LONGEST = 20, 300.0
# A float64 run that may take longer, in seconds, is made with one sample.
_LONG = 10.0
# How often the number of threads that run on this machine is read, and the seconds between.
_SAMPLES, _INTERVAL = 5, 0.004
_LOADAVG = Path("/proc/loadavg")


def verify(
    reference: nn.Module | Callable[[], nn.Module],
    prepared: nn.Module,
    batch: Any,
    *,
    level: Level = "short",
    pipeline: Pipeline | None = None,
    mode: Mode = "eval",
    gradients: bool = True,
    seconds: float | None = None,
    memory: int | None = None,
    amp: Amp = "none",
    _exact_runs: ExactRuns | None = None,
) -> Verification:
    """Check whether `prepared` computes the outputs and gradients of `reference`, within its dtype's error.

    Args:
        reference: the unprepared model with the same weights, e.g. `copy.deepcopy(model)` before `apply`;
            or a function that builds it, for a model that cannot be copied.
        prepared: the model that `apply` returned. Both models are restored: gradients, buffers, hooks, modes.
        batch: the input of the unprepared model: a tensor, a tuple of positional or a mapping of named
            arguments, or an Example.
        level: `short` compares one mode on this batch. `full` compares eval and train mode, one and two
            samples, and inputs as they are and with a mean of 100 standard deviations.
        pipeline: the pipeline that prepared the model. It formats the batch, unless the model formats its
            inputs itself, and checks that every tensor still has the wanted device, dtype and layout.
            Without a pipeline, the batch is moved to the prepared model's device and dtype.
        mode: the mode in which the model will be used. In `train`, wrong gradients and buffers fail the
            verification; in `eval` they are reported, and only wrong outputs, and buffers that a forward in
            eval mode changes, fail it.
        gradients: compare gradients in mode `eval` too, where they are only reported.
        seconds: the time limit in seconds; by default 30, up to 300 for a large model or if other programs
            use the processors, and 600 for `full`.
        memory: the memory limit in bytes; by default half of the free memory. Both are estimated
            before each run; a run that does not fit is reported as `cannot tell`, with the reason.
        amp: run the forward of the prepared model under `torch.autocast` to this dtype, with scaled gradients
            for float16. The tolerance is then that of the dtype; the exact run has no autocast.

    The reference runs in float64 if that fits into the limits, else in float32, and this run is taken as
    exact. Where float64 does not fit, or where kinks would hide errors of the gradients in mode `train`, each
    module is compared alone with float64, see `prepare.stages.verify.compare_modules`. The tolerance follows
    from the error of the reference itself in the prepared model's dtypes, see
    `prepare.stages.verify.tolerance`. Dropout is off, and both models draw the same random numbers, see
    `prepare.stages.verify.execution.determinism`; the gradient of each output is random. If something is
    wrong, the first module that is wrong is searched for, in the order of execution. A compiled model is
    compared twice: its modules without the compiler, and as it will be used, on the unchanged batch and, in
    mode eval, forward only. The estimates do not include the compilation time.

    Raises:
        RefusedError: both models are the same object, `level`, `mode` or `amp` is unknown, mode `train` is
            requested without gradients, or a lazy module has no parameters yet.
    """
    if not isinstance(reference, nn.Module):
        reference = reference()
    _check_arguments(reference, prepared, level=level, mode=mode, gradients=gradients)
    amp = read_amp(amp)
    autocast(amp, device_of([prepared]))  # raises if the device has none
    memory = memory or default_memory(prepared)
    budget = Budget(seconds or SECONDS[level], memory, longest=0.0 if seconds else _LONGEST)
    call = call_of(batch).map(Tensor.detach)
    rewritten, mode_changed = rewritten_modules(reference, prepared, pipeline)
    models = ModelPair(reference, prepared, pipeline, rewritten, amp)
    losses = cast_losses(models.pairs)
    checks = [
        check_values(reference, prepared, models.pairs, rewritten),
        check_casts(losses),
        check_flags(reference, prepared, mode_changed),
        *([] if pipeline is None else [check_layout(prepared, pipeline)]),
    ]
    # Several verifications of one reference on one batch may share their exact runs.
    comparison_of = partial(
        CaseComparison,
        models,
        budget=budget,
        mode=mode,
        gradients=gradients,
        exact_runs={} if _exact_runs is None else _exact_runs,
    )
    first, *others = cases_for(level, mode, call)
    with _threads_for_free_cores():
        with eager_if_compiled(prepared):
            cost = estimate(reference, first.call, training_flags(prepared, first.mode))
            if seconds is None:
                _extend_time(budget, models, first, cost)
            comparisons = [comparison_of(first, cost=cost), *map(comparison_of, others)]
            if not others and _takes_one_sample(first, cost, gradients=gradients):
                # The outputs of the whole batch, and the gradients of one sample.
                whole = replace(first, outputs_only=True)
                one = replace(first, call=resized(call, 1))
                comparisons = [comparison_of(whole, cost=cost), comparison_of(one)]
            for comparison in comparisons:
                checks += comparison.checks()
        if contains_compiled(prepared):
            is_safe = all(each.unsafe is None for each in comparisons)
            comparisons.append(comparison_of(first, compiled=True, gradients=gradients and is_safe))
            checks += comparisons[-1].checks()
        with eager_if_compiled(prepared):
            return conclude(
                models, checks, comparisons, losses, level=level, mode=mode, budget=budget
            )


def _extend_time(budget: Budget, models: ModelPair, case: VerificationCase, cost: Cost) -> None:
    """Give a large model more time, by the measured time of one forward of the reference."""
    step = partial(cost.seconds, torch.float32, backward=case.mode == "train")
    is_too_large = cost.bytes(torch.float32, backward=False) > budget.memory
    if is_too_large or _STEPS * step() <= budget.seconds:
        return
    flags = training_flags(models.prepared, case.mode)
    try:
        with budget.timing(cost, torch.float32, backward=False):
            run_model(models.reference, case.call, same_stand_in, flags=flags, backward=False)
    except Exception as error:  # the comparison raises it again, and explains it
        raise_if_out_of_memory(error)
        return
    budget.seconds = time_limit(budget.seconds, step() * budget.pace(torch.float32))


def time_limit(seconds: float, step: float) -> float:
    """Return the limit of the time of a model whose step takes `step` seconds, at least `seconds`."""
    return max(seconds, min(_STEPS * step, _LONGEST))


def _takes_one_sample(case: VerificationCase, cost: Cost, *, gradients: bool) -> bool:
    """Return True if a short verification in mode eval compares the gradients of one sample only."""
    is_large = cost.seconds(torch.float64, backward=gradients) > _LONG
    return is_large and case.mode == "eval" and (case.call.batch or 1) > 1


def default_memory(model: nn.Module) -> int:
    """Return half of the free memory: that of the model's device, but no more than that of the CPU."""
    devices = {tensor.device for tensor in model.parameters()} | {torch.device("cpu")}
    free = [count for device in devices if (count := free_memory(device)) is not None]
    return int(_FREE_PART * min(free)) if free else _UNKNOWN_MEMORY


def _check_arguments(
    reference: nn.Module, prepared: nn.Module, *, level: str, mode: str, gradients: bool
) -> None:
    for name, word, allowed in (("level", level, SECONDS), ("mode", mode, ("eval", "train"))):
        if word not in allowed:
            raise RefusedError(name, f"{word!r} is not a {name}", choose(word, allowed))
    if mode == "train" and not gradients:
        remedy = "remove gradients=False, or set mode='eval'"
        raise RefusedError("gradients", "mode 'train' requires them", remedy)
    if prepared is reference:
        remedy = "apply works in place: pass copy.deepcopy(model), taken before apply, as reference"
        raise RefusedError("prepared", "is the same object as the reference", remedy)
    for model in (reference, prepared):
        if parameter := lazy_parameter(model):
            raise RefusedError(
                parameter, "this parameter has no shape yet", "run one forward first"
            )


def _threads_for_free_cores() -> AbstractContextManager[None]:
    """Limit torch's threads inside the block to the cores on which nothing else runs, at least one.

    Threads that wait for a busy core make torch slower.
    """
    free = len(usable_cores()) - _other_runnable()
    return with_threads(min(torch.get_num_threads(), max(1, free)))


def _other_runnable() -> int:
    """Return how many other threads of this machine run or wait for a core; 0 if the system does not say."""
    counts = []
    try:
        for _ in range(_SAMPLES):
            counts.append(int(_LOADAVG.read_text().split()[3].partition("/")[0]) - 1)
            time.sleep(_INTERVAL)
    except (OSError, ValueError, IndexError):
        return 0
    return max(min(counts), 0)
