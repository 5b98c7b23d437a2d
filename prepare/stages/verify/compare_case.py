"""Compare the prepared model with the exact run and the baseline on one case, and judge what differs."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from prepare.core.forward.explain_error import explained
from prepare.core.model.tensors import name_of
from prepare.core.utils.numbers import finite
from prepare.core.utils.text import plural
from prepare.stages.verify.compare_modules import MODULE_FIELDS, ModuleDifferences, compare_modules
from prepare.stages.verify.execution.budget import Budget, Cost, estimate
from prepare.stages.verify.execution.determinism import training_flags
from prepare.stages.verify.execution.runner import (
    CannotTellError,
    ExactRuns,
    ModelPair,
    PreparedModelError,
    Runner,
    RunResults,
    raise_if_out_of_memory,
    unsafe_text,
)
from prepare.stages.verify.execution.single_run import RESULT_FIELDS, RunResult
from prepare.stages.verify.inputs import RETRIES, VerificationCase, jittered
from prepare.stages.verify.records import ALL_ZERO, Check
from prepare.stages.verify.second_call import side_effects
from prepare.stages.verify.tolerance import (
    Deviation,
    all_zero,
    first_non_finite,
    is_too_noisy,
    rounding_floor,
    rounding_step,
    sensitivity,
)

# Modules are compared alone if the whole model's gradients would hide systematic errors of this fraction.
SHARP = 0.001
_GRADIENTS = tuple(kind for kind in RESULT_FIELDS if "gradients" in kind)
_FROZEN = "inputs without gradients"


@dataclass
class CaseComparison:
    """The comparison of one case: its differences, or the reason why there are none.

    Without `gradients` no backward runs. `exact_runs` caches exact runs, see `Runner`. With `compiled`
    the prepared model runs with its compiler; in mode eval only its outputs are then compared, since it
    was compiled for inference. `cost` is the estimate of its call, if it is known. `raised` is the error
    of the prepared model, `retry_failure` the reason why a difference could not be compared again. `alone`
    is the comparison of the modules alone, `unsafe` a run whose backward may end the process.
    """

    models: ModelPair
    case: VerificationCase
    budget: Budget
    mode: str
    compiled: bool = False
    gradients: bool = True
    exact_runs: ExactRuns = field(default_factory=dict)
    cost: Cost | None = None
    differences: dict[str, list[Deviation]] = field(default_factory=dict, init=False)
    raised: str = field(default="", init=False)
    retry_failure: str = field(default="", init=False)
    alone: ModuleDifferences | None = field(default=None, init=False)
    unsafe: RunResult | None = field(default=None, init=False)
    _unaffordable: str = field(default="", init=False)
    runner: Runner = field(init=False, repr=False)

    def checks(self) -> list[Check]:
        """Run the case. Return one check for each kind of tensor, or one with the reason for a failure."""
        try:
            # A step may have frozen a part of the prepared model; the reference runs in the same modes.
            flags = training_flags(self.models.prepared, self.case.mode)
            cost = self.cost or estimate(self.models.reference, self.case.call, flags)
            if self._has_backward and self.mode == "eval":
                self._unaffordable = self.budget.refuses(cost, torch.float32)
            self.runner = Runner(
                self.models,
                flags,
                self.budget,
                cost,
                compiled=self.compiled,
                backward=self._has_backward,
                case=self.case,
                exact_runs=self.exact_runs,
            )
            results = self.runner.run_all(self.case.call)
            changes = side_effects(self.runner, self.case, results)
            frozen = self._with_frozen_inputs(results)
        except CannotTellError as reason:
            return [self.check("outputs", "cannot tell", note=str(reason))]
        except PreparedModelError as error:
            if self._forward_alone(f"the backward of the prepared model raises: {error}"):
                return self.checks()
            self.raised = str(error)
            return [self.check("forward", "fail", note=self.raised)]
        except Exception as error:  # the reference's own code raised it
            raise_if_out_of_memory(error)
            explanation = explained(self.models.reference, error)
            if self._forward_alone(f"the backward of the reference raises: {explanation}"):
                return self.checks()
            return [self._reference_raised(error)]
        self.differences = {
            kind: self.models.compare(results, kind) for kind in self._kinds(results)
        }
        wrong = [kind for kind in RESULT_FIELDS if self.exceeding(kind)]
        # Without float64 a second look proves little, and modules alone are compared with float64.
        may_be_proven = lacks_float64(self) and all(may_be_rounding(self, kind) for kind in wrong)
        alone = module_checks(self, self._judged(results)) if wrong and may_be_proven else []
        if not alone or any(check.status == "skipped" or check.note for check in alone):
            self._compare_again(results)
        checks = self._judged(results) + self._skipped_gradients(results)
        alone = alone or module_checks(self, checks)
        checks = without_outputs(self, without_proof(self, checks, alone), alone)
        failed = [self.check(kind, "fail", worst=name, note=note) for kind, name, note in changes]
        return checks + alone + failed + self._frozen_checks(results, frozen)

    def _forward_alone(self, reason: str) -> bool:
        """In mode eval, compare without the backward, which may be what raised; False if that was done."""
        if not self._has_backward or self.mode == "train":
            return False
        self._unaffordable = reason
        return True

    def _judged(self, results: RunResults) -> list[Check]:
        return [self._judge(kind, results) for kind in self.differences if kind in RESULT_FIELDS]

    @property
    def exact_dtype(self) -> torch.dtype | None:
        """The dtype of the exact run; None if nothing was compared."""
        return self.runner.exact_dtype if self.differences else None

    def exceeding(self, kind: str) -> list[Deviation]:
        """Return the tensors of a kind whose error exceeds the tolerance, the worst first."""
        items = [item for item in self.differences.get(kind, []) if item.exceeds]
        return sorted(items, key=lambda item: -item.excess)

    def modules_alone(self) -> ModuleDifferences:
        """Compare all modules alone, if that was not done and fits into the budget."""
        if self.alone is None:
            # Where outputs are wrong the forward is enough, and more modules run alone without a backward.
            backward = self._has_backward and not self.exceeding("outputs")
            try:
                self.alone = compare_modules(self.runner, self.case.call, backward=backward)
            except (CannotTellError, PreparedModelError):
                self.alone = ModuleDifferences()
        return self.alone

    @property
    def _has_backward(self) -> bool:
        if self.case.outputs_only or self._unaffordable:
            return False
        return self.gradients and not (self.compiled and self.mode == "eval")

    def _kinds(self, results: RunResults) -> list[str]:
        if self._has_backward and results.prepared.unsafe_module is None:
            return list(RESULT_FIELDS)
        return ["outputs"] if self.compiled or self.case.outputs_only else ["outputs", "buffers"]

    def _skipped_gradients(self, results: RunResults) -> list[Check]:
        """Return the checks of gradients that were skipped, with the reason."""
        if self._unaffordable:
            note = f"not compared: {self._unaffordable}"
        elif results.prepared.unsafe_module is not None:
            return self._unsafe_checks(results.prepared)
        else:
            return []
        return [self.check(kind, "skipped", note=note) for kind in _GRADIENTS]

    def _unsafe_checks(self, result: RunResult) -> list[Check]:
        """Return the checks of gradients that were not computed, as their backward may end the process."""
        self.unsafe, note = result, f"{unsafe_text(result)}, so it was not run"
        status = "fail" if self.mode == "train" else "skipped"
        return [self.check(kind, status, note=note) for kind in _GRADIENTS]

    def _with_frozen_inputs(self, results: RunResults) -> RunResult | None:
        """Run the prepared model as training does, on inputs without gradients; None if it shows no more."""
        is_trained = self.mode == self.case.mode == "train" and self._has_backward
        if not is_trained or self.case.is_variation or not results.prepared.inputs:
            return None
        if results.prepared.unsafe_module is not None or self.compiled:
            return None
        return self.runner.run_prepared(self.case.call, frozen_inputs=True)

    def _frozen_checks(self, results: RunResults, frozen: RunResult | None) -> list[Check]:
        """Return checks of gradients that are wrong only where the inputs need none."""
        if frozen is None:
            return []
        if frozen.unsafe_module is not None:
            return [replace(c, inputs=_FROZEN) for c in self._unsafe_checks(frozen)[1:]]
        kind = "parameter gradients"
        before = self.models.compare(
            replace(results, exact=results.prepared, prepared=frozen), kind
        )
        differs = {item.name for item in before if item.exceeds}
        deviations = self.models.compare(replace(results, prepared=frozen), kind)
        wrong = [item for item in deviations if item.exceeds and item.name in differs]
        # A checkpoint, or code of the model, may give no gradient for such inputs in both models.
        own = self.runner.run_baseline(self.case.call, frozen_inputs=True) if wrong else []
        if own:
            deviations = self.models.compare(replace(results, exact=own[0], prepared=frozen), kind)
            wrong = [item for item in deviations if item.exceeds and item.name in differs]
        if not wrong:
            return []
        worst = max(wrong, key=lambda item: item.excess)
        check = self.check(
            kind, "fail", worst=worst.name, note=worst.note, compared=len(deviations)
        )
        error, allowed = finite(worst.error), finite(worst.allowed)
        return [replace(check, inputs=_FROZEN, error=error, allowed=allowed)]

    def _compare_again(self, results: RunResults) -> None:
        """Repeat the comparison while tensors exceed their tolerance, and keep the mildest of each.

        Stop if all that exceeds is beyond noise, or if a difference beyond noise fails the verification.
        """
        for seed in range(RETRIES + 1):
            excess = [(kind, item) for kind in self.differences for item in self.exceeding(kind)]
            certain = [kind for kind, item in excess if item.is_beyond_noise]
            if len(certain) == len(excess) or any(map(self._counts, certain)):
                return
            call = self.case.call
            try:
                if seed:
                    call = call.map(partial(jittered, seed=seed))
                    results = self.runner.run_all(call)
                results.perturbed += self.runner.run_perturbed(call, self._forward_error(), seed)
            except (CannotTellError, PreparedModelError) as reason:
                self.retry_failure = str(reason)
                return
            for kind in self._kinds(results):
                before = self.differences[kind]
                again = {item.name: item for item in self.models.compare(results, kind)}
                self.differences[kind] = [_milder(item, again.get(item.name)) for item in before]

    def _forward_error(self) -> float:
        """Return the largest error of the outputs, but no more than rounding in one module explains."""
        dtype = self.models.dtype
        eps, floor = torch.finfo(dtype).eps, rounding_floor(dtype, self.models.depth)
        errors = [item.error for item in self.differences["outputs"]]
        if not all(error <= floor for error in errors):
            return eps  # the outputs are wrong, so their error is not one of rounding
        return min(max([*errors, eps]), rounding_step(dtype))

    def _judge(self, kind: str, results: RunResults) -> Check:
        differences, exceeding = self.differences[kind], self.exceeding(kind)
        if name := first_non_finite(getattr(results.exact, RESULT_FIELDS[kind])):
            note = "the reference is not finite here"
            return self.check(kind, "cannot tell", worst=name, note=note)
        if not differences:
            status = "cannot tell" if kind == "outputs" else "skipped"
            return self.check(kind, status, note="there is nothing to compare")
        if kind == "outputs" and not exceeding and all_zero(results.exact.outputs):
            status = "skipped" if self.case.is_variation else "cannot tell"
            return self.check(kind, status, note=ALL_ZERO)
        changes: dict[str, Any] = {}
        if exceeding and self.retry_failure and not exceeding[0].is_beyond_noise:
            note = f"not decided, since a second look was not possible: {self.retry_failure}"
            changes = {"status": self.undecided(kind), "note": note}
        elif not exceeding and kind != "buffers" and is_too_noisy(differences):
            note = f"the unprepared model in {name_of(self.models.dtype)} is itself too far off"
            note += "; with trained weights it may not be" if "gradients" in kind else ""
            changes = {"status": self.undecided(kind), "note": note}
        if kind != "buffers":
            seen, place = sensitivity(differences, by_module=kind == "parameter gradients")
            changes |= {"sensitivity": finite(seen), "least_sensitive": place}
        return self.worst(kind, compared=len(differences), **changes)

    def worst(self, kind: str, **results: Any) -> Check:
        """Return the check of a kind of tensors with the worst of them, a failure if that is too far off."""
        worst = max(self.differences[kind], key=lambda item: item.excess)
        failed = "fail" if self._counts(kind) else "wrong"
        values = {"status": failed if self.exceeding(kind) else "pass", "note": worst.note}
        return self.check(
            kind,
            **values | results,
            worst=worst.name,
            error=finite(worst.error),
            allowed=finite(worst.allowed),
        )

    def _counts(self, kind: str) -> bool:
        """Return True if a wrong tensor of this kind fails the verification; in eval, gradients do not."""
        is_buffer_of_eval = kind == "buffers" and self.case.mode == "eval"
        return kind.endswith("outputs") or self.mode == "train" or is_buffer_of_eval

    def undecided(self, kind: str) -> str:
        """Return the status of a check that could not be decided."""
        return "cannot tell" if self._counts(kind) else "skipped"

    def _reference_raised(self, error: Exception) -> Check:
        raise_if_out_of_memory(error)
        note = f"the reference raises: {explained(self.models.reference, error)}"
        status = "skipped" if self.case.is_variation else "cannot tell"
        return self.check("forward", status, note=note)

    def check(self, kind: str, status: str, **results: Any) -> Check:
        """Return a check of this case; `results` are further fields of Check."""
        inputs = [self.case.inputs, "compiled" if self.compiled else ""]
        return Check(
            what=kind,
            status=status,
            mode=self.case.mode,
            batch=self.case.call.batch,
            inputs=", ".join(filter(None, inputs)),
            dtype=name_of(self.models.dtype),
            **results,
        )


def _milder(before: Deviation, again: Deviation | None) -> Deviation:
    if again is None or math.isnan(before.error) or before.excess <= again.excess:
        return before
    return again


def module_checks(comparison: CaseComparison, checks: list[Check]) -> list[Check]:
    """Compare all modules alone if the `checks` of the whole model hide errors; return further checks."""
    if not _are_needed(comparison, checks):
        return []
    runner, backward = comparison.runner, _has_gradients(checks)
    kinds = [kind for kind in MODULE_FIELDS if backward or kind == "module outputs"]
    try:
        alone = compare_modules(runner, comparison.case.call, backward=backward)
    except (CannotTellError, PreparedModelError) as reason:
        note = f"not compared: {reason}"
        return [comparison.check(kind, "skipped", note=note) for kind in kinds]
    comparison.differences |= alone.deviations
    comparison.alone = alone
    return [_judge_alone(comparison, kind, alone, checks) for kind in kinds]


def _are_needed(comparison: CaseComparison, checks: list[Check]) -> bool:
    case = comparison.case
    if comparison.compiled or case.is_variation or case.outputs_only:
        return False
    if comparison.models.amp != "none":  # each module would need the casts of the code around it
        return False
    if any(check.status == "fail" and check.what == "outputs" for check in checks):
        return False
    if lacks_float64(comparison):
        return True
    if any(check.note == ALL_ZERO for check in checks):
        return True
    if not comparison.mode == case.mode == "train":
        return False
    failed = [check.what for check in checks if check.status == "fail"]
    if failed:
        return all(may_be_rounding(comparison, what) for what in failed)
    return _is_blind(comparison, checks)


def _is_blind(comparison: CaseComparison, checks: list[Check]) -> bool:
    """Return True if the whole model hides an error of `SHARP` in the gradients of a module."""
    gradients = [check for check in checks if "gradients" in check.what]
    if not _has_gradients(checks) or any(check.status != "pass" for check in gradients):
        return _has_gradients(checks)
    # Modules with small gradients count too, as those behind a layer scale of 1e-6.
    deviations = comparison.differences["parameter gradients"]
    seen, _ = sensitivity(deviations, by_module=True, negligible=0.0)
    return seen > SHARP or any((check.sensitivity or 0.0) > SHARP for check in gradients)


def without_proof(
    comparison: CaseComparison, checks: list[Check], alone: list[Check]
) -> list[Check]:
    """Turn failures of the whole model's gradients where only rounding may be the cause.

    If every module alone is right in float64, and the whole model's gradients are those of its modules, the
    model amplifies rounding, and that is not a failure. Else it is `cannot tell` if some modules had no
    gradients in the whole model, or without float64, where the error of the exact run is not known.
    """
    if len(alone) != len(MODULE_FIELDS) or not all(map(_is_right, alone)):
        return checks
    is_sum = comparison.alone.is_sum if comparison.alone else None
    if is_sum is False and not lacks_float64(comparison):
        return checks
    status = "pass" if is_sum else "cannot tell"
    seen = max(comparison.alone.tolerances.values(), default=0.0) if comparison.alone else 0.0
    return [_without_proof(comparison, check, status, seen) for check in checks]


def without_outputs(
    comparison: CaseComparison, checks: list[Check], alone: list[Check]
) -> list[Check]:
    """Skip outputs that are all zero if every module alone is right, and some have other outputs."""
    has_numbers = any(item.allowed for item in comparison.differences.get("module outputs", []))
    if not has_numbers or not all(map(_is_right, alone)):
        return checks
    note = f"{ALL_ZERO}; each module alone is right"
    return [
        replace(check, status="skipped", note=note) if check.note == ALL_ZERO else check
        for check in checks
    ]


def _is_right(check: Check) -> bool:
    return check.status == "pass" and not check.note


def _without_proof(comparison: CaseComparison, check: Check, status: str, seen: float) -> Check:
    exceeding = comparison.exceeding(check.what)
    if not exceeding or not may_be_rounding(comparison, check.what):
        return check
    # The modules alone would not show it, or it is a factor, which amplified rounding is not.
    if all(item.error <= seen for item in exceeding) or any(i.is_factor for i in exceeding):
        return check
    deviations = [
        replace(i, allowed=max(i.allowed, i.error)) for i in comparison.differences[check.what]
    ]
    finds, place = sensitivity(deviations, by_module=check.what == "parameter gradients")
    changes: dict[str, Any] = {"sensitivity": finite(finds), "least_sensitive": place}
    # The check has no difference, so the search for the first wrong module does not stop here.
    kept = [item for item in comparison.differences[check.what] if not item.exceeds]
    comparison.differences[check.what] = kept
    if status == "pass":
        note = f"{check.worst} amplifies rounding: each module alone is right"
        return replace(check, status=status, note=note, error=None, allowed=None, **changes)
    reason = "some modules get no gradient"
    if lacks_float64(comparison):
        reason = f"float64 does not fit: {comparison.runner.refused}"
    note = f"may be amplified rounding: each module alone is right, and {reason}"
    return replace(check, status=comparison.undecided(check.what), note=note, **changes)


def may_be_rounding(comparison: CaseComparison, kind: str) -> bool:
    """Return True if all that exceeds its tolerance are gradients, and by no more than noise may explain."""
    exceeding = comparison.exceeding(kind)
    return "gradients" in kind and not any(item.is_beyond_noise or item.note for item in exceeding)


def lacks_float64(comparison: CaseComparison) -> bool:
    """Return True if the exact run was in float32, since float64 does not fit."""
    return comparison.exact_dtype == torch.float32 and not comparison.runner.exact_raised


def _has_gradients(checks: list[Check]) -> bool:
    return any(check.what == "parameter gradients" and check.compared for check in checks)


def _judge_alone(
    comparison: CaseComparison, kind: str, alone: ModuleDifferences, checks: list[Check]
) -> Check:
    left_out = _left_out(alone)
    if not alone.deviations.get(kind):
        return comparison.check(kind, "skipped", note=left_out or "nothing to compare")
    finds, place = alone.sensitivities.get(kind, (None, ""))
    if alone.left_out:
        # An error in a module that is left out is seen in the whole model only.
        whole = [c.sensitivity or 0.0 for c in checks if kind.partition(" ")[2] in c.what]
        finds, place = max((finds or 0.0, place), (max(whole), next(iter(alone.left_out))))
    check = comparison.worst(
        kind, compared=len(alone.compared), sensitivity=finds, least_sensitive=place
    )
    return check if comparison.exceeding(kind) else replace(check, note=left_out)


def _left_out(alone: ModuleDifferences) -> str:
    if not alone.left_out:
        return ""
    name, reason = next(iter(alone.left_out.items()))
    count = plural(len(alone.left_out), "module")
    return f"{count} not compared alone, first {name or 'the model itself'}: {reason}"
