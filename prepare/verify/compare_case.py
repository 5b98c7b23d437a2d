"""Compares on one case what the exact, the plain and the prepared model give."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from prepare.core.forward.explain_error import explained
from prepare.core.model.tensors import name_of
from prepare.verify.execution.budget import Budget, estimate
from prepare.verify.execution.determinism import flags_for
from prepare.verify.execution.runner import RaisedError, Runner, Three, UnknownError, pass_on
from prepare.verify.inputs import jittered
from prepare.verify.records import Check
from prepare.verify.tolerance import (
    Difference,
    compare,
    floor_of,
    not_finite,
    step_of,
    too_noisy,
)

if TYPE_CHECKING:
    from torch import nn

    from prepare.verify.cases import Case
    from prepare.verify.execution.model_pair import Models
    from prepare.verify.execution.single_run import Named, Run

PARTS = {
    "outputs": "outputs",
    "input gradients": "inputs",
    "parameter gradients": "parameters",
    "buffers": "buffers",
}
# Outputs and input gradients are on a scale of their own; a parameter's is that of its module.
SCALED = {
    "input gradients": "gradient",
    "parameter gradients": "module gradient",
    "buffers": "module",
}
# How often what exceeds its tolerance is looked at again, on inputs that differ by this part.
TRIES, JITTER = 2, 0.02
_RANDOM = (
    "the reference itself gives other outputs with every seed: it draws random numbers that cannot be "
    "held still, or is not deterministic"
)
_RANDOM_COMPILED = (
    "compiled, it gives other outputs with every seed: dropout and random numbers cannot be held "
    "still there"
)


@dataclass
class Comparison:
    """One case: what was compared, and why something could not be.

    Without `gradients` nothing runs backward. `exact` keeps exact runs, see `Runner`. With
    `compiled` the prepared model runs with its compiler; in mode eval only its outputs are compared,
    since it is compiled for no more.
    """

    models: Models
    case: Case
    budget: Budget
    mode: str
    compiled: bool = False
    gradients: bool = True
    exact: dict[Any, Any] = field(default_factory=dict)
    differences: dict[str, list[Difference]] = field(default_factory=dict)
    raised: str = ""
    unsure: str = ""
    runner: Runner | None = None

    def checks(self) -> list[Check]:
        """Runs the case. One check for each kind of tensor, or one that says why there is none."""
        try:
            # A step may have frozen a part of the prepared model; the reference runs so, too.
            flags = flags_for(self.models.prepared, self.case.mode)
            cost = estimate(self.models.reference, self.case.call, flags)
            how = {"compiled": self.compiled, "backward": self._has_backward}
            how |= {"case": self.case, "kept": self.exact, "careful": self.mode == "eval"}
            self.runner = Runner(self.models, flags, self.budget, cost, **how)
            three = self.runner.three(self.case.call)
            self._check_repeatable(three)
        except UnknownError as reason:
            return [self._check("outputs", "cannot tell", note=str(reason))]
        except RaisedError as raised:
            self.raised = str(raised)
            return [self._check("forward", "fail", note=self.raised)]
        except Exception as error:  # the reference's own code
            return [self._reference_raised(error)]
        parts, unsafe = self._parts(three), self._unsafe(three)
        self.differences = {what: self._compare(three, what) for what in parts}
        self._look_again(three)
        return [self._judge(what, three) for what in parts] + unsafe

    @property
    def _has_backward(self) -> bool:
        return self.gradients and not (self.compiled and self.mode == "eval")

    def _parts(self, three: Three) -> list[str]:
        if self._has_backward and three.ours.beyond is None:
            return list(PARTS)
        return ["outputs"] if self.compiled else ["outputs", "buffers"]

    def _unsafe(self, three: Three) -> list[Check]:
        """What is said of gradients that were not computed, since memory might be overwritten."""
        if (name := three.ours.beyond) is None:
            return []
        note = f"torch may overwrite memory in the backward of {name or 'the model'}, so there was none"
        return [self._check(what, "skipped", note=note) for what in PARTS if "gradients" in what]

    @property
    def exact_dtype(self) -> torch.dtype | None:
        """What was taken as exact; None where nothing was compared."""
        return self.runner.exact_dtype if self.runner and self.differences else None

    def wrong(self, what: str) -> list[Difference]:
        """The tensors of that kind whose error exceeds what is allowed, the worst first."""
        found = [one for one in self.differences.get(what, []) if one.exceeds]
        return sorted(found, key=lambda one: -one.excess)

    def traced(self, make: Callable[[nn.Module], Any]) -> tuple[Any, Any, Any] | None:
        """The exact, the plain and the prepared model run once more, each under its own `make(model)`.

        None where that does not fit any more.
        """
        reference = self.models.reference
        traces = make(reference), make(reference), make(self.models.prepared)
        try:
            self.runner.three(self.case.call, traces)
        except (UnknownError, RaisedError):
            return None
        return traces

    def _check_repeatable(self, three: Three) -> None:
        again = self.runner.plain(self.case.call, seed=1, backward=False)
        for once, other in zip(three.plain, again, strict=False):
            if any(one.exceeds for one in self._differ(once, [], other, "outputs")):
                raise UnknownError(_RANDOM)
        if self.compiled:
            again = self.runner.ours(self.case.call, seed=1)
            if any(one.exceeds for one in self._differ(three.ours, [], again, "outputs")):
                raise UnknownError(_RANDOM_COMPILED)

    def _compare(self, three: Three, what: str) -> list[Difference]:
        plain = three.plain + (three.noisy if "gradients" in what else [])
        return self._differ(three.exact, plain, three.ours, what)

    def _differ(self, exact: Run, plain: list[Run], ours: Run, what: str) -> list[Difference]:
        def kept(run: Run) -> Named:
            named, free = getattr(run, PARTS[what]), self.models.free
            return {k: v for k, v in named.items() if not any(k.startswith(f"{n}.") for n in free)}

        how = {"dtype": self.models.dtype, "depth": self.models.depth}
        plain = [kept(run) for run in plain]
        return compare(kept(exact), plain, kept(ours), scaled=SCALED.get(what, ""), **how)

    def _look_again(self, three: Three) -> None:
        """Of what exceeds, keeps for each tensor the try in which it exceeds least.

        What no noise could excuse is settled, and the whole with it, where it counts.
        """
        for seed in range(TRIES + 1):
            wrong = [(what, one) for what in self.differences for one in self.wrong(what)]
            settled = [what for what, one in wrong if one.is_beyond_noise]
            if len(settled) == len(wrong) or any(map(self._counts, settled)):
                return
            call = jittered(self.case.call, JITTER, seed) if seed else self.case.call
            try:
                three = self.runner.three(call) if seed else three
                three.noisy += self.runner.noisy(call, self._forward_error(), seed)
            except (UnknownError, RaisedError) as reason:
                self.unsure = str(reason)
                return
            for what, before in self.differences.items():
                again = {one.name: one for one in self._compare(three, what)}
                self.differences[what] = [_milder(one, again.get(one.name)) for one in before]

    def _forward_error(self) -> float:
        """The largest error of the outputs, as far as rounding in one module may make it."""
        dtype = self.models.dtype
        eps, floor = torch.finfo(dtype).eps, floor_of(dtype, self.models.depth)
        found = [one.error for one in self.differences["outputs"]]
        if not all(error <= floor for error in found):
            return eps  # the outputs are wrong, and so say nothing about rounding
        return min(max([*found, eps]), step_of(dtype))

    def _judge(self, what: str, three: Three) -> Check:
        found, wrong = self.differences[what], self.wrong(what)
        if name := not_finite(getattr(three.exact, PARTS[what])):
            note = "the reference is not finite here"
            return self._check(what, "cannot tell", worst=name, note=note)
        if not found:
            status = "cannot tell" if what == "outputs" else "skipped"
            return self._check(what, status, note="there is nothing to compare")
        worst = max(found, key=lambda one: one.excess)
        counts = self._counts(what)
        status, note = ("fail" if counts else "wrong") if wrong else "pass", worst.note
        if wrong and self.unsure and not worst.is_beyond_noise:
            status = "cannot tell"
            note = f"is off, and to look again was not possible: {self.unsure}"
        elif not wrong and what != "buffers" and too_noisy(found):
            status = "cannot tell" if counts else "skipped"
            note = f"the unprepared model in {name_of(self.models.dtype)} is itself too far off"
            note += "; with trained weights it may not be" if "gradients" in what else ""
        numbers = {"error": _number(worst.error), "allowed": _number(worst.allowed)}
        return self._check(
            what, status, worst=worst.name, compared=len(found), note=note, **numbers
        )

    def _counts(self, what: str) -> bool:
        """Whether it fails the verification: in mode eval, what only training uses does not."""
        return (
            what == "outputs"
            or self.mode == "train"
            or (what == "buffers" and self.case.mode == "eval")
        )

    def _reference_raised(self, error: Exception) -> Check:
        pass_on(error)
        note = f"the reference raises: {explained(self.models.reference, error)}"
        status = "skipped" if self.case.is_variation else "cannot tell"
        return self._check("forward", status, note=note)

    def _check(self, what: str, status: str, **more: Any) -> Check:
        inputs = ", ".join(filter(None, (self.case.inputs, self.compiled and "compiled")))
        case = {"mode": self.case.mode, "batch": self.case.call.batch, "inputs": inputs}
        return Check(what=what, status=status, dtype=name_of(self.models.dtype), **case, **more)


def _milder(one: Difference, other: Difference | None) -> Difference:
    return one if other is None or math.isnan(one.error) or one.excess <= other.excess else other


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
