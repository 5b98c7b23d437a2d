"""Conclude a verification from its checks: status, reason, first wrong module, and advice."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prepare.core.model.issues_here import CallIssues, describe
from prepare.core.model.tensors import name_of, named_modules
from prepare.core.utils.environment import environment
from prepare.verify.advice import Fault, advise
from prepare.verify.compare_modules import MODULE_FIELDS
from prepare.verify.records import Check, Lost, Verification

if TYPE_CHECKING:
    import torch
    from torch import nn

    from prepare.verify.compare_case import CaseComparison
    from prepare.verify.execution.budget import Budget
    from prepare.verify.execution.model_pair import ModelPair

_SEVERITY = ("fail", "wrong", "cannot tell")


def conclude(
    models: ModelPair,
    checks: list[Check],
    comparisons: list[CaseComparison],
    losses: tuple[Lost, ...],
    *,
    level: str,
    mode: str,
    budget: Budget,
) -> Verification:
    """Conclude from the checks; run the models again to find the first wrong module if a check failed."""
    bad = [check for check in checks if check.status in ("fail", "wrong")]
    statuses = {check.status for check in checks}
    worst = min(
        (check for check in checks if check.status in _SEVERITY),
        key=lambda check: _SEVERITY.index(check.status),
        default=None,
    )
    culprit, advice = _diagnose(models, bad, comparisons) if bad else ("", "")
    exact_dtypes = [
        name_of(c.exact_dtype) for c in comparisons if c.exact_dtype and not c.case.outputs_only
    ]
    return Verification(
        status=next((word for word in ("fail", "cannot tell") if word in statuses), "pass"),
        reason=_reason(worst) if worst else "",
        level=level,
        mode=mode,
        reference=max(exact_dtypes, default="", key=lambda name: name == "float32"),
        checks=tuple(checks),
        lost=losses,
        culprit=culprit,
        advice=advice,
        seconds=round(budget.spent(), 3),
        environment=environment(),
        amp=models.amp,
    )


def _diagnose(
    models: ModelPair, bad: list[Check], comparisons: list[CaseComparison]
) -> tuple[str, str]:
    """Return the culprit by its dotted name, the model itself by its class name; and the advice."""
    failed = next((c for c in comparisons if any(map(c.exceeding, c.differences))), None)
    by_compiler = failed is not None and failed.compiled
    name: str | None = ""
    shape: torch.Size | None = None
    if failed is None:
        name = next((check.worst for check in bad if not check.mode), None)
    elif not by_compiler:
        name, shape = _first_wrong_module(failed)
    module = None if name is None else dict(named_modules(models.prepared)).get(name)
    culprit = name or (type(models.prepared).__name__ if name is not None else "")
    differences = [
        item for c in comparisons for kind in c.differences for item in c.exceeding(kind)
    ]
    baseline_wrong = any(item.is_baseline_wrong for item in differences)
    fault = Fault(
        failed=frozenset(check.what for check in bad),
        culprit=culprit,
        module=module,
        steps=models.pipeline.to_config() if models.pipeline else {},
        raised=next((c.raised for c in comparisons if c.raised), ""),
        by_compiler=by_compiler,
        baseline_wrong_in=name_of(models.dtype) if baseline_wrong else "",
        at_this_size=_issues_of(module, shape),
    )
    return culprit, advise(fault)


def _issues_of(module: nn.Module | None, shape: torch.Size | None) -> tuple[str, ...]:
    """Return the known issues that a call of `module` has at this size."""
    if module is None or shape is None:
        return ()
    device = next((tensor.device.type for tensor in module.parameters()), "cpu")
    return tuple(map(describe, CallIssues(device).of(module, shape)))


def _reason(check: Check) -> str:
    case = ", ".join(filter(None, (check.mode and f"{check.mode} mode", check.inputs)))
    case += f", batch {check.batch}" if check.batch else ""
    head = f"{check.what} ({case})" if case else check.what
    if check.note:
        subject = f"{check.worst} " if check.worst and check.worst not in check.note else ""
        return f"{head}: {subject}{check.note}"
    if check.error is None:
        return f"{head}: {check.worst} is infinitely far from the reference"
    return f"{head}: {check.worst} is off by {check.error:.2g} of its scale, {check.allowed:.2g} is allowed"


def _first_wrong_module(comparison: CaseComparison) -> tuple[str | None, torch.Size | None]:
    """Return the first module that is wrong, and the shape of its input.

    A module that is wrong alone is the first, since each module got the inputs that it had. If no module
    shows it, return the owner of the worst gradient or buffer.
    """
    found = comparison.modules_alone()
    for kind in MODULE_FIELDS:
        if wrong := [item for item in found.deviations.get(kind, []) if item.exceeds]:
            return wrong[0].name, found.shapes.get(wrong[0].name)
    worst = [*comparison.exceeding("parameter gradients"), *comparison.exceeding("buffers")]
    return (worst[0].name.rpartition(".")[0] if worst else None), None
