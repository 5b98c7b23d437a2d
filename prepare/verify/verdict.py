"""Draws the conclusion from all checks: one status, why, who is to blame, and what to do about it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prepare.core.model.tensors import name_of, named_modules
from prepare.verify.advice import Fault, advise
from prepare.verify.fault_locator import Trace, first_wrong_gradient, first_wrong_output
from prepare.verify.records import Check, Lost, Verification

if TYPE_CHECKING:
    from prepare.verify.compare_case import Comparison
    from prepare.verify.execution.budget import Budget
    from prepare.verify.execution.model_pair import Models

_ORDER = ("fail", "wrong", "cannot tell")


def conclude(
    models: Models,
    checks: list[Check],
    comparisons: list[Comparison],
    lost: tuple[Lost, ...],
    *,
    level: str,
    mode: str,
    budget: Budget,
) -> Verification:
    """The verification that these checks amount to; runs the models again where one found a fault."""
    bad = [check for check in checks if check.status in ("fail", "wrong")]
    status = next(
        (s for s in ("fail", "cannot tell") if any(c.status == s for c in checks)), "pass"
    )
    first = min(
        (c for c in checks if c.status in _ORDER),
        key=lambda c: _ORDER.index(c.status),
        default=None,
    )
    culprit, advice = _blame(models, bad, comparisons) if bad else ("", "")
    exact = [name_of(c.exact_dtype) for c in comparisons if c.exact_dtype]
    return Verification(
        status=status,
        reason=_reason(first) if first else "",
        level=level,
        mode=mode,
        reference=max(exact, default="", key=lambda name: name == "float32"),
        checks=tuple(checks),
        lost=lost,
        culprit=culprit,
        advice=advice,
        seconds=round(budget.spent(), 3),
    )


def _blame(models: Models, bad: list[Check], comparisons: list[Comparison]) -> tuple[str, str]:
    """The culprit by its dotted name, the model itself by its class's; and the advice."""
    wrong = next((c for c in comparisons if any(map(c.wrong, c.differences))), None)
    by_compiler = wrong is not None and wrong.compiled
    name = (
        ""
        if by_compiler
        else _culprit(wrong)
        if wrong
        else next((c.worst for c in bad if not c.mode), None)
    )
    module = dict(named_modules(models.prepared)).get(name)
    culprit = name or (type(models.prepared).__name__ if name is not None else "")
    wrongs = [one for c in comparisons for what in c.differences for one in c.wrong(what)]
    plainly = any(one.is_plainly_wrong for one in wrongs)
    fault = Fault(
        what=frozenset(check.what for check in bad),
        culprit=culprit,
        module=module,
        steps=models.pipeline.to_config() if models.pipeline else {},
        raised=next((c.raised for c in comparisons if c.raised), ""),
        by_compiler=by_compiler,
        plainly_wrong=name_of(models.dtype) if plainly else "",
    )
    return culprit, advise(fault)


def _reason(check: Check) -> str:
    where = ", ".join(filter(None, (check.mode and f"{check.mode} mode", check.inputs)))
    where += f", batch {check.batch}" if check.batch else ""
    head = f"{check.what} ({where})" if where else check.what
    if check.note:
        subject = f"{check.worst} " if check.worst and check.worst not in check.note else ""
        return f"{head}: {subject}{check.note}"
    if check.error is None:
        return f"{head}: {check.worst} is off by more than any number"
    return f"{head}: {check.worst} is off by {check.error:.2g} of its scale, {check.allowed:.2g} is allowed"


def _culprit(comparison: Comparison) -> str | None:
    """The first module where the case went wrong; the owner of the worst gradient where none shows it."""
    how = {"dtype": comparison.models.dtype, "depth": comparison.models.depth}
    owners = {one.name.rpartition(".")[0] for one in comparison.wrong("parameter gradients")}
    traces, found = comparison.traced(Trace), None
    if traces and comparison.wrong("outputs"):
        found = first_wrong_output(*traces, **how)
    if traces and found is None and (owners or comparison.wrong("input gradients")):
        found = first_wrong_gradient(*traces, owners, **how)
    if found is None:
        worst = [*comparison.wrong("parameter gradients"), *comparison.wrong("buffers")]
        found = worst[0].name.rpartition(".")[0] if worst else None
    return found
