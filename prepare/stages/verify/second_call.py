"""Call both models a second time, to find results that differ from call to call or are written again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from prepare.stages.verify.execution.runner import CannotTellError, Runner, RunResults
from prepare.stages.verify.execution.side_effects import shared_outputs
from prepare.stages.verify.tolerance import Deviation, all_finite

if TYPE_CHECKING:
    from torch import nn

    from prepare.stages.verify.execution.single_run import RunResult
    from prepare.stages.verify.inputs import VerificationCase

_RANDOM = (
    "the reference itself returns other outputs with every seed: it draws random numbers that cannot be "
    "fixed, or is not deterministic"
)
_RANDOM_COMPILED = (
    "the compiled model returns other outputs with every seed: its dropout and random numbers cannot be "
    "fixed"
)
_UNSTABLE = (
    "the prepared model differs between its own calls, as with a race, memory that was not initialised, or a "
    "kernel that depends on threads"
)
# A model may be wrong in a few of its calls: so many more calls are compared, in these seconds, or in this
# part of the seconds that the verification has taken until then.
_MORE_CALLS, _SECONDS, _PART = 10, 0.25, 0.1


def side_effects(
    runner: Runner, case: VerificationCase, results: RunResults
) -> list[tuple[str, str, str]]:
    """Call both models again: is the batch changed, or are outputs overwritten?

    Return the kind of each failure, the first tensor that it concerns, and a note; `results` are those of
    the first calls.

    Raises:
        CannotTellError: the outputs of one of them differ from call to call.
        PreparedModelError: the prepared model raised.
    """
    models = runner.models
    unprepared = [results.exact, *results.baseline]
    changed = results.prepared.changed.difference(*(run.changed for run in unprepared))
    overwritten: set[str] = set()
    if not case.outputs_only:
        repeated = runner.run_baseline(case.call, seed=1, backward=False)
        again = _repeat(runner, case, results, repeated)
        if repeated and results.baseline and not runner.compiled:
            overwritten = _overwritten(models.prepared, results.prepared, again)
            overwritten -= _overwritten(models.reference, results.baseline[0], repeated[0])
    differing = {
        "batch": (changed, "is changed in place, and the reference does not change it"),
        "output memory": (overwritten, "is overwritten by the next call"),
    }
    return [(kind, min(names), note) for kind, (names, note) in differing.items() if names]


def _repeat(
    runner: Runner, case: VerificationCase, results: RunResults, repeated: list[RunResult]
) -> RunResult:
    """Call the prepared model again; `repeated` holds calls of the reference with another seed."""
    for first, second in zip(results.baseline, repeated, strict=False):
        # An overflow is not a random number.
        if all_finite(second.outputs) and any(_moved(runner, first, second)):
            raise CannotTellError(_RANDOM)
    if runner.compiled:
        again = runner.run_prepared(case.call, seed=1)
        if all_finite(again.outputs) and any(_moved(runner, results.prepared, again)):
            raise CannotTellError(_RANDOM_COMPILED)
        return again
    again = runner.run_prepared(case.call, backward=False)
    compared = runner.models.compare(results, "outputs")
    if any(item.is_beyond_noise for item in compared):
        return again
    allowed = {item.name: item.allowed for item in compared}
    spent = runner.budget.spent()
    last, end = again, spent + max(_SECONDS, _PART * spent)
    for left in reversed(range(_MORE_CALLS + 1)):
        if moved := list(_moved(runner, results.prepared, last, allowed)):
            worst = max(moved, key=lambda item: item.excess)
            by = worst.note or f"by {worst.error:.2g} of its scale"
            raise CannotTellError(f"{_UNSTABLE}: {worst.name} {by}")
        if not left or runner.budget.spent() > end:
            break
        last = runner.run_prepared(case.call, backward=False)
    return again


def _moved(
    runner: Runner, first: RunResult, second: RunResult, allowed: Mapping[str, float] | None = None
) -> Iterator[Deviation]:
    """Yield the outputs that differ between two calls by more than rounding, or than is `allowed`."""
    least = allowed or {}
    for item in runner.models.compare(RunResults(first, [], second), "outputs"):
        if item.exceeds and not item.error <= least.get(item.name, 0):
            yield item


def _overwritten(model: nn.Module, first: RunResult, second: RunResult) -> set[str]:
    """Return the outputs of one call that the next one overwrites."""
    return first.kept | shared_outputs(model, first.outputs, second.outputs)
