"""Run all checks of a verification, and draw the conclusion."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from prepare.core.forward.autocast import autocast, check_amp, device_of
from prepare.core.forward.call import call_of
from prepare.core.forward.compiled import contains_compiled, eager_if_compiled
from prepare.core.forward.stand_ins import lazy_parameter
from prepare.core.model.devices import free_memory
from prepare.core.utils.suggest import choose
from prepare.core.utils.wording import argument
from prepare.errors import RefusedError
from prepare.verify.cases import VerificationCase, affordable, cases_for
from prepare.verify.compare_case import CaseComparison
from prepare.verify.execution.budget import Budget, Cost, estimate
from prepare.verify.execution.determinism import training_flags
from prepare.verify.execution.free_cores import threads_for_free_cores
from prepare.verify.execution.model_pair import ModelPair
from prepare.verify.execution.runner import raise_if_out_of_memory
from prepare.verify.execution.single_run import run_model, same_stand_in
from prepare.verify.metric import check_metric
from prepare.verify.static_checks import (
    cast_losses,
    check_casts,
    check_flags,
    check_layout,
    check_values,
    rewritten_modules,
    tensor_pairs,
)
from prepare.verify.verdict import conclude

if TYPE_CHECKING:
    from prepare.pipeline import Pipeline
    from prepare.verify import Level, Mode
    from prepare.verify.execution.runner import ExactRuns
    from prepare.verify.metric import Limit
    from prepare.verify.records import Verification

_SECONDS = {"short": 30.0, "full": 600.0}
# The memory limit is this part of the free memory; the bytes where the system does not report it.
_FREE_PART, _UNKNOWN_MEMORY = 0.5, 4 * 2**30

# A model whose runs take long has the time of so many of them, up to a limit in seconds.
_STEPS, _LONGEST = 20, 300.0
# A float64 run that may take longer, in seconds, is made with one sample.
_LONG = 10.0


def check_model(
    reference: nn.Module,
    prepared: nn.Module,
    batch: Any,
    *,
    level: Level = "short",
    pipeline: Pipeline | None = None,
    mode: Mode = "eval",
    gradients: bool = True,
    seconds: float | None = None,
    memory: int | None = None,
    amp: str = "none",
    limit: Limit | None = None,
    exact_runs: ExactRuns | None = None,
) -> Verification:
    """Verify `prepared` against `reference`; the arguments are those of `prepare.verify.verify`.

    `limit` is the user's own. `exact_runs` caches exact runs: several verifications of one reference on one
    batch may share it.
    """
    _check_arguments(reference, prepared, level=level, mode=mode, gradients=gradients)
    check_amp(amp)
    autocast(amp, device_of([prepared]))  # raises if the device has none
    budget = Budget(seconds or _SECONDS[level], memory or _default_memory(prepared))
    call, pairs = call_of(batch).map(Tensor.detach), tensor_pairs(reference, prepared)
    rewritten, mode_changed = rewritten_modules(reference, prepared, pipeline)
    losses = cast_losses(pairs)
    checks = [
        check_values(reference, prepared, pairs, rewritten),
        check_casts(losses),
        check_flags(reference, prepared, mode_changed),
    ]
    if pipeline is not None:
        checks.append(check_layout(prepared, pipeline))
    models = ModelPair.of(reference, prepared, pairs, pipeline, rewritten, amp=amp)
    if models.quantized and mode == "train":
        wrong = "the prepared model has weights in 8 bits, which cannot be trained"
        raise RefusedError("mode", wrong, argument("mode", "eval"))
    cached = {} if exact_runs is None else exact_runs

    def comparison_of(
        case: VerificationCase, *, compiled: bool = False, cost: Cost | None = None
    ) -> CaseComparison:
        return CaseComparison(
            models,
            case,
            budget,
            mode,
            compiled=compiled,
            gradients=gradients,
            exact_runs=cached,
            cost=cost,
        )

    cases = cases_for(level, mode, call)
    with threads_for_free_cores():
        with eager_if_compiled(prepared):
            cost = _first_cost(models, cases[0])
            comparisons = [
                comparison_of(case, cost=cost if case is cases[0] else None) for case in cases
            ]
            if cost and seconds is None:
                _extend_time(budget, models, cases[0], cost)
            if cost and _takes_one_sample(cases, cost, gradients=gradients):
                whole, one = affordable(cases[0])
                comparisons = [comparison_of(whole, cost=cost), comparison_of(one)]
            for comparison in comparisons:
                checks += comparison.checks()
        if contains_compiled(prepared):
            comparisons.append(comparison_of(cases[0], compiled=True))
            checks += comparisons[-1].checks()
        if limit is not None:
            checks.append(check_metric(models, limit, call))
        with eager_if_compiled(prepared):
            return conclude(
                models, checks, comparisons, losses, level=level, mode=mode, budget=budget
            )


def _first_cost(models: ModelPair, case: VerificationCase) -> Cost | None:
    """Return the estimate of the user's own batch; None if its forward raises, which a case reports."""
    try:
        return estimate(models.reference, case.call, training_flags(models.prepared, case.mode))
    except Exception:  # the model's own code; the comparison raises it again, and explains it
        return None


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
    except (
        Exception
    ) as error:  # the model's own code; the comparison raises it again, and explains it
        raise_if_out_of_memory(error)
        return
    needed = _STEPS * step() * budget.pace(torch.float32)
    budget.seconds = max(budget.seconds, min(needed, _LONGEST))


def _takes_one_sample(cases: list[VerificationCase], cost: Cost, *, gradients: bool) -> bool:
    """Return True if a short verification in mode eval compares the gradients of one sample only."""
    is_large = cost.seconds(torch.float64, backward=gradients) > _LONG
    return (
        len(cases) == 1 and cases[0].mode == "eval" and (cases[0].call.batch or 1) > 1 and is_large
    )


def _default_memory(model: nn.Module) -> int:
    """Return half of the free memory: that of the model's device, but no more than that of the CPU."""
    devices = {tensor.device for tensor in model.parameters()} | {torch.device("cpu")}
    free = [count for device in devices if (count := free_memory(device)) is not None]
    return int(_FREE_PART * min(free)) if free else _UNKNOWN_MEMORY


def _check_arguments(
    reference: nn.Module, prepared: nn.Module, *, level: str, mode: str, gradients: bool
) -> None:
    for name, word, allowed in (("level", level, _SECONDS), ("mode", mode, ("eval", "train"))):
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
