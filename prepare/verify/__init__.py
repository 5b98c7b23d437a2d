"""Checks that a prepared model still computes what the unprepared one does: outputs, and gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from prepare.core.utils.suggest import choose
from prepare.errors import RefusedError
from prepare.verify.records import Check, Lost, Verification

if TYPE_CHECKING:
    from torch import nn

    from prepare.pipeline import Pipeline

__all__ = ["Check", "Lost", "Verification", "verify"]

Level = Literal["short", "full"]
Mode = Literal["eval", "train"]
_SECONDS = {"short": 30.0, "full": 600.0}
_MEMORY = {"short": 4 * 2**30, "full": 16 * 2**30}


def verify(
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
    _exact: dict[Any, Any] | None = None,
) -> Verification:
    """Whether `prepared` gives the outputs and gradients of `reference`, as closely as its dtype allows.

    Args:
        reference: the unprepared model with the same weights, say `copy.deepcopy(model)` before `apply`.
        prepared: what `apply` made of it. Both stay as they are: gradients, buffers, hooks, modes.
        batch: what the unprepared model is called with: a tensor, a tuple of positional or a mapping
            of named arguments, or an Example.
        level: `short` compares one mode on this batch. `full` compares eval and train mode, one and
            two samples, inputs as they are and with a mean of 100 deviations.
        pipeline: what prepared it; formats the batch, unless the model does so itself, and is asked
            whether all is still as it wants.
            Without one the batch is only brought to the prepared model's device and dtype.
        mode: what the model is for. In `train`, gradients and buffers count; in `eval` wrong ones
            are reported, and only the rest fails.
        gradients: whether they are looked at in mode `eval` too, where they are only reported.
        seconds: the limit of time, 30 by default and 600 for `full`.
        memory: the limit in bytes, 4 GiB by default and 16 for `full`. Both are estimated before
            each run; what does not fit is `cannot tell`, with the reason.

    The reference runs in float64 where that fits, else in float32, and that is taken as exact. How
    far the prepared model may be from it follows from the error that the reference itself makes in
    the prepared model's dtypes, see `prepare.verify.tolerance`. Dropout is off, and the random
    numbers that the models draw are the same, see `prepare.verify.execution.determinism`; the
    gradient of each output is drawn at random. Where something is wrong, the first module where it
    goes wrong is looked for, in the order of execution. A compiled model is compared twice: its
    modules as they run without the compiler, and as it will be used, the batch as it is: in mode
    eval forward alone. How long the compiler takes is in no estimate.

    Raises:
        RefusedError: both models are one object, `level` or `mode` is no such word, `train` is asked for
            without gradients, or a lazy module has no parameters yet.
    """
    from torch import Tensor

    from prepare.core.forward.call import call_of
    from prepare.core.forward.compiled import contains_compiled, eager_if_compiled
    from prepare.core.forward.stand_ins import lazy_parameter
    from prepare.verify.cases import cases_for
    from prepare.verify.compare_case import Comparison
    from prepare.verify.execution.budget import Budget
    from prepare.verify.execution.model_pair import Models
    from prepare.verify.static_checks import (
        check_casts,
        check_flags,
        check_layout,
        check_values,
        lost_in,
        pairs_of,
        rewritten,
    )
    from prepare.verify.verdict import conclude

    _check_words(level, mode)
    if mode == "train" and not gradients:
        raise RefusedError("gradients", "in mode train they count", "leave it out, or ask for eval")
    if prepared is reference:
        remedy = "apply works in place: give copy.deepcopy(model) from before as reference"
        raise RefusedError("prepared", "is the reference itself", remedy)
    for model in (reference, prepared):
        if name := lazy_parameter(model):
            raise RefusedError(name, "this parameter has no shape yet", "run one forward first")
    budget = Budget(seconds or _SECONDS[level], memory or _MEMORY[level])
    call, pairs = call_of(batch).map(Tensor.detach), pairs_of(reference, prepared)
    free, modes = rewritten(reference, prepared, pipeline)
    lost = lost_in(pairs)
    checks = [
        check_values(reference, prepared, pairs, free),
        check_casts(lost),
        check_flags(reference, prepared, modes),
    ]
    if pipeline is not None:
        checks.append(check_layout(prepared, pipeline))
    models = Models.of(reference, prepared, pairs, pipeline, free)
    cases = cases_for(level, mode, call)
    # Verifications of one model on one batch may share what is exact, where that is outputs alone.
    how = {"gradients": gradients, "exact": {} if _exact is None else _exact}
    comparisons = [Comparison(models, case, budget, mode, **how) for case in cases]
    with eager_if_compiled(prepared):
        for comparison in comparisons:
            checks += comparison.checks()
    if contains_compiled(prepared):
        comparisons.append(Comparison(models, cases[0], budget, mode, compiled=True, **how))
        checks += comparisons[-1].checks()
    with eager_if_compiled(prepared):
        return conclude(models, checks, comparisons, lost, level=level, mode=mode, budget=budget)


def _check_words(level: str, mode: str) -> None:
    for where, word, allowed in (("level", level, _SECONDS), ("mode", mode, ("eval", "train"))):
        if word not in allowed:
            raise RefusedError(where, f"{word!r} is none", choose(word, allowed))
