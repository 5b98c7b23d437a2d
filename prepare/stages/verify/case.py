"""Compare the prepared model with the unprepared one on one call, and judge what differs."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from prepare.core.forward.compiled import contains_compiled, eager_if_compiled
from prepare.core.forward.input_formatter import same_casts
from prepare.core.forward.run_example import explained
from prepare.core.model.tensors import name_of
from prepare.core.utils.numbers import finite
from prepare.core.utils.text import plural
from prepare.stages.verify.deviations import (
    FACTOR,
    Deviation,
    compare,
    is_finite,
    largest,
    rounding_step,
    sensitivity,
)
from prepare.stages.verify.inputs import jittered, nudged, rounded_call, user_call
from prepare.stages.verify.modules_alone import MODULE_KINDS, compare_alone
from prepare.stages.verify.records import ALL_ZERO, Check
from prepare.stages.verify.runs import (
    KINDS,
    Run,
    cast,
    compiled_stand_in,
    run_model,
    same_stand_in,
)
from prepare.stages.verify.same_numbers import training_flags
from prepare.stages.verify.static_checks import is_under

if TYPE_CHECKING:
    from prepare.core.forward.call import Call
    from prepare.pipeline import Pipeline
    from prepare.stages.verify.budget import Budget
    from prepare.stages.verify.static_checks import TensorPairs

# A run in float64 may take so many times as long as one in float32.
_SLOWER = 6.0
# Gradients of modules that are right alone may be off by so many times what is allowed: amplified rounding.
_AMPLIFIED = 30.0
# A leaf with so much of what is allowed is named for wrong outputs, if none has more.
_SUSPECT = 0.1
_GRADIENTS, _OF_MODULES = KINDS[1:3], KINDS[2:]
_RANDOM = "returns other outputs with every seed: its dropout and random numbers cannot be fixed"
_UNSTABLE = (
    "the prepared model differs between its own calls, as with a race, memory that was not initialised, or a "
    "kernel that depends on threads"
)


class CannotTellError(Exception):
    """The models cannot be compared; the message says why."""


class RunError(Exception):
    """A model raised; the message explains the error, `whose` says which model."""

    def __init__(self, text: str, whose: str) -> None:
        super().__init__(text)
        self.whose = whose


@dataclass
class VerificationCase:
    """One call in the mode of use; in `eval`, wrong gradients do not fail.

    `rewritten` names the modules whose tensors a structure step replaced, `pairs` holds the tensors that both
    models have in common. After `checks`, `deviations` holds what was compared by its kind, of leaves alone
    with the module as name; `culprit` the first wrong module, `exact_dtype` the dtype of the exact run,
    `unsafe` the module whose backward may end the process and the known issue, and `raised` the prepared
    model's error.
    """

    reference: nn.Module
    prepared: nn.Module
    pipeline: Pipeline | None
    amp: str
    budget: Budget
    rewritten: tuple[str, ...]
    pairs: TensorPairs
    call: Call
    mode: str
    backward: bool
    deviations: dict[str, list[Deviation]] = field(default_factory=dict)
    culprit: str | None = None
    exact_dtype: torch.dtype = torch.float64
    unsafe: tuple[str, str] | None = None
    raised: str = ""
    _skipped: str = ""

    def __post_init__(self) -> None:
        tensors = (*self.prepared.parameters(), *self.prepared.buffers())
        dtypes = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
        dtypes |= set() if self.amp == "none" else {getattr(torch, self.amp)}
        #: The coarsest dtype of the prepared model.
        self.dtype = max(dtypes, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)
        self.flags = training_flags(self.prepared, self.mode)
        self._depth = sum(bool(module._parameters) for module in self.prepared.modules())
        self.targets = {path: (new.dtype, new.device) for path, (_, new) in self.pairs.items()}
        self._by_id = {id(old): self.targets[path] for path, (old, _) in self.pairs.items()}
        self._compiled = contains_compiled(self.prepared)
        self._graph = self._lacks_kernel = False
        self._left_out: dict[str, str] = {}
        self._alone: set[str] = set()
        self._shake = partial(jittered, seed=2, fraction=rounding_step(self.dtype))

    @property
    def wrong(self) -> list[Deviation]:
        """Return what is off by more than is allowed."""
        return [item for items in self.deviations.values() for item in items if item.exceeds]

    def checks(self) -> list[Check]:
        """Run all models. Return one check for each kind of tensor, or one with the reason for a failure."""
        try:
            return self._compared()
        except CannotTellError as reason:
            return [self._check("outputs", "cannot tell", note=str(reason))]
        except RunError as error:
            if self.backward and self.mode == "eval":
                self.backward = False
                self._skipped = f"the backward of the {error.whose} raises: {error}"
                return self.checks()
            if error.whose == "prepared model":
                self.raised = str(error)
                return [self._check("forward", "fail", note=self.raised)]
            return [self._check("forward", "cannot tell", note=f"the reference raises: {error}")]

    def _compared(self) -> list[Check]:
        first = self._first_call()
        wide = not self._refusal(first, torch.float64)
        self.exact_dtype = torch.float64 if wide else torch.float32
        exact, noisy, actual = self._all_runs(self.call)
        if self.backward and noisy.unsafe is not None:
            raise CannotTellError(f"of the unprepared model, {_unsafe_note(noisy)}")
        self.unsafe = actual.unsafe if self.backward else None
        self.deviations = self._deviations(exact, [noisy], actual)
        more = self._other_calls(first, noisy, actual)
        is_zero = not any(map(largest, exact.tensors["outputs"].values()))
        self._look_closer(exact, noisy, actual, everywhere=is_zero or not wide)
        checks = [self._judged(kind, items, exact) for kind, items in self.deviations.items()]
        if is_zero:
            right = any(item.size for item in self.deviations.get(MODULE_KINDS[0], ()))
            right = right and not self._left_out and not self._wrong_modules()
            note = f"{ALL_ZERO}; each module alone is right" if right else ALL_ZERO
            status = "skipped" if right else "cannot tell"
            checks[0] = replace(checks[0], status=status, note=note, worst="")
        if note := self._skipped or (_unsafe_note(actual) if self.backward else ""):
            status = "fail" if self.mode == "train" else "skipped"
            more += [self._check(kind, status, note=note) for kind in _GRADIENTS]
        return checks + more

    # ------------------------------------------------------------------------------------- the runs

    def _prepared(self, call: Call, *, as_used: bool = False, **options: Any) -> Run:
        """Run the prepared model, without its compiler unless `as_used`."""
        call, compiled = user_call(call, self.prepared, self.pipeline), as_used and self._compiled
        stand_in = compiled_stand_in if compiled else same_stand_in
        options |= {"amp": self.amp, "compiled": compiled}
        with contextlib.nullcontext() if compiled else eager_if_compiled(self.prepared):
            return self._run(self.prepared, call, stand_in, **options)

    def _noisy(self, call: Call, **options: Any) -> Run:
        """Run the reference in the prepared dtypes or, where torch lacks a kernel, with rounded outputs."""
        with eager_if_compiled(self.prepared):
            call = rounded_call(call, self.prepared, self.pipeline, self.dtype).map(nudged)
        options |= {"repair": self.dtype}
        if not self._lacks_kernel:
            given = call.map(lambda tensor: cast(tensor, tensor.dtype))
            try:
                with same_casts(self.reference, self.prepared):
                    return self._run(self.reference, given, self._low, amp=self.amp, **options)
            except RunError:
                if torch.finfo(self.dtype).bits >= 32:
                    raise
                self._lacks_kernel = True

        def stand_in(tensor: Tensor) -> Tensor:
            return cast(self._low(tensor), torch.float32)

        options = {"change": lambda tensor: tensor.to(self.dtype).to(tensor.dtype)} | options
        return self._run(self.reference, call.map(stand_in), stand_in, **options)

    def _low(self, tensor: Tensor) -> Tensor:
        """Cast one of the reference's tensors to the prepared model's dtype and device, contiguous."""
        return cast(tensor, *self._by_id.get(id(tensor), (tensor.dtype, tensor.device)))

    def _exact(self, call: Call) -> Run:
        wide, convert = self.exact_dtype == torch.float64, partial(cast, dtype=self.exact_dtype)
        options: Any = {"repair": self.exact_dtype, "wide": wide}
        try:
            return self._run(self.reference, call.map(convert), convert, **options)
        except RunError:
            if not wide:
                raise
            self.exact_dtype = torch.float32  # the model casts to float32 itself
            return self._exact(call)

    def _run(self, model: nn.Module, *what: Any, **options: Any) -> Run:
        own: Any = {"backward": self.backward, "graph": self._graph, "flags": self.flags}
        try:
            return run_model(model, *what, **own | options)
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            whose = "prepared model" if model is self.prepared else "reference"
            raise RunError(str(explained(model, error)), whose) from error

    def _all_runs(self, call: Call, **options: Any) -> tuple[Run, Run, Run]:
        """Run the exact, the unprepared and the prepared model."""
        noisy = self._noisy(call, record=True, **options)
        return self._exact(call), noisy, self._prepared(call, record=True)

    def _first_call(self) -> Run:
        """Call the prepared model without a backward: what it takes says whether the others fit."""
        once = partial(self._prepared, self.call, as_used=True, backward=False, seed=1)
        try:
            first = once()
        except RunError:
            self._graph = True  # a forward that differentiates, as that of a force field
            self._exact(self.call)  # it is no fault if the reference raises too
            first = once()
        self.budget.extend(first.seconds * (3 if self.mode == "train" else 1))
        reason = self._refusal(first, torch.float32)
        if reason and self.backward and self.mode == "eval":
            self._skipped, self.backward = f"not compared: {reason}", False
            reason = self._refusal(first, torch.float32)
        if reason:
            raise CannotTellError(reason)
        return first

    def _refusal(self, first: Run, dtype: torch.dtype) -> str:
        """Say why a run of the reference does not fit into the budget; empty if it fits."""
        backward = 1 + self.backward
        weights = sum(tensor.numel() for tensor in self.prepared.parameters())
        seconds = first.seconds * (2 * backward - 1) * (_SLOWER if dtype == torch.float64 else 1)
        return self.budget.refuses(seconds, (2 * weights + first.numbers) * backward, dtype)

    def _deviations(self, exact: Run, noisy: list[Run], actual: Run) -> dict[str, list[Deviation]]:
        found = {}
        for kind in KINDS:
            if not all(kind in run.tensors for run in (exact, actual)):
                continue
            left = self.rewritten if kind in _OF_MODULES else ()
            right, given = (
                {n: t for n, t in run.tensors[kind].items() if not is_under(n, left)}
                for run in (exact, actual)
            )
            found[kind] = self._compare(kind, right, [run.tensors[kind] for run in noisy], given)
        return found

    def _compare(self, kind: str, exact: Any, noisy: Any, actual: Any) -> list[Deviation]:
        return compare(kind, exact, noisy, actual, dtype=self.dtype, depth=self._depth)

    # -------------------------------------------------------------------------------- further looks

    def _look_closer(self, exact: Run, noisy: Run, actual: Run, *, everywhere: bool) -> None:
        """Compare the leaves alone, allow amplified rounding, and keep what is wrong on other inputs too."""
        if self.mode == "eval":
            # Gradients are not used: such as rounding explains are not looked at any further.
            for kind in {*_GRADIENTS} & {*self.deviations}:
                items = self.deviations[kind]
                self.deviations[kind] = [_allowed(i) if _may_be_rounding(i) else i for i in items]
        if any("gradients" in item.kind and not item.is_garbage for item in self.wrong):
            # Rounding may flip the sign of a ReLU's input, or change the maximum of a pooling window.
            runs = [noisy, self._noisy(self.call, change=self._shake)]
            self.deviations = self._deviations(exact, runs, actual)
        # In a forward that differentiates, gradients pass its modules more than once.
        if not self._graph and (self.mode == "train" or self.wrong or everywhere):
            names = {c.name for c in actual.calls if not is_under(c.name, self.rewritten)}
            alone, self._left_out = compare_alone(self, actual, names)
            self._alone = names - {*self._left_out}
            self.deviations |= {k: alone[k] for k in MODULE_KINDS[: 1 + self.backward]}
        self._allow_amplified(noisy, actual)
        if self.wrong and not all(item.is_garbage for item in self.wrong):
            self._look_again()
            self._allow_amplified(noisy, actual)
        if self.wrong:
            self.culprit = self._first_wrong(noisy, actual)

    def _look_again(self) -> None:
        """Keep what is wrong on slightly different inputs too."""
        moved = self.call.map(partial(jittered, seed=1))
        exact, noisy, actual = self._all_runs(moved, change=self._shake)
        again, names = self._deviations(exact, [noisy], actual), self._wrong_modules()
        if names:
            again |= compare_alone(self, actual, names)[0]
        wrong = {(i.kind, i.name) for items in again.values() for i in items if i.exceeds}
        for kind, items in self.deviations.items():
            self.deviations[kind] = [
                item if item.is_garbage or (kind, item.name) in wrong else _allowed(item)
                for item in items
            ]

    def _wrong_modules(self) -> list[str]:
        return list(dict.fromkeys(item.name for item in self.wrong if item.kind in MODULE_KINDS))

    def _allow_amplified(self, noisy: Run, actual: Run) -> None:
        """Allow the errors of gradients if every module alone is right: the model amplifies rounding."""
        if self._left_out or not self._alone or self._wrong_modules():
            return
        if _first_cut(noisy, actual) is None and all(map(_may_be_rounding, self.wrong)):
            for kind, items in self.deviations.items():
                self.deviations[kind] = list(map(_allowed, items))

    def _first_wrong(self, noisy: Run, actual: Run) -> str | None:
        """Return the first module that is wrong, by its name; None if it is not known."""
        if names := self._wrong_modules():
            return names[0]
        if (name := _first_cut(noisy, actual)) is not None:
            return name
        outputs = self.deviations.get(MODULE_KINDS[0], ())
        first = max(outputs, key=lambda item: item.excess, default=None)
        if self.wrong[0].kind == "outputs":
            return first.name if first and first.excess > _SUSPECT else ""
        # The code between its modules is wrong: that of the module which holds all that is wrong.
        owners = [i.name.split(".")[:-1] for i in self.wrong if i.kind in _OF_MODULES]
        if not owners:
            return None
        common = takewhile(lambda parts: len({*parts}) == 1, zip(*owners, strict=False))
        return ".".join(parts[0] for parts in common)

    def _other_calls(self, first: Run, noisy: Run, actual: Run) -> list[Check]:
        """Call the prepared model once more as it will be used, in training on inputs without gradients.

        Raises:
            CannotTellError: the outputs differ from call to call.
        """
        trains = self.mode == "train" and bool(actual.tensors.get(_GRADIENTS[0]))
        third = self._prepared(self.call, as_used=True, backward=False, graph=self._graph or trains)
        moved = [i for run in (first, third) for i in self._moved(actual, run)]
        if any(item.is_garbage for item in self.deviations["outputs"]):
            moved = []
        if moved or any(item.allowed == FACTOR * item.noise for item in self.deviations["outputs"]):
            second = self._noisy(self.call, backward=False, seed=1).tensors["outputs"]
            again = self._compare("outputs", noisy.tensors["outputs"], [], second)
            if any(item.exceeds and not math.isnan(item.error) for item in again):
                raise CannotTellError(f"the reference itself {_RANDOM}")
        if moved:
            return [self._unstable(moved[0], self._moved(first, third))]
        if trains and third.unsafe is not None and self.unsafe is None:
            self.unsafe, note = third.unsafe, _unsafe_note(third)
            given = "inputs without gradients"
            return [self._check(_GRADIENTS[1], "fail", note=note, inputs=given)]
        return [self._check("outputs", "pass", inputs="compiled")] if self._compiled else []

    def _unstable(self, item: Deviation, between: list[Deviation]) -> Check:
        """Return the check of outputs that are wrong in another call of the prepared model."""
        if item.note:
            return self._described("fail", replace(item, note=f"{item.note} in another call"))
        if self._compiled and not between:
            return self._described("fail", item, inputs="compiled")
        if self._compiled:
            raise CannotTellError(f"the compiled model {_RANDOM}")
        raise CannotTellError(f"{_UNSTABLE}: {item.name} by {item.error:.2g} of its scale")

    def _moved(self, one: Run, other: Run) -> list[Deviation]:
        """Return the outputs that differ between two runs by more than is allowed."""
        allowed = {item.name: item.allowed for item in self.deviations["outputs"]}
        items = self._compare("outputs", one.tensors["outputs"], [], other.tensors["outputs"])
        return [i for i in items if i.exceeds and not i.error <= allowed.get(i.name, 0.0)]

    # --------------------------------------------------------------------------------- the judgement

    def _judged(self, kind: str, items: list[Deviation], exact: Run) -> Check:
        for name, tensor in exact.tensors.get(kind, {}).items():
            if not is_finite(tensor):
                note = "the reference is not finite here"
                return self._check(kind, "cannot tell", worst=name, note=note)
        alone, note = kind in MODULE_KINDS, ""
        if alone and self._left_out:
            name, reason = next(iter(self._left_out.items()))
            note = f"{plural(len(self._left_out), 'module')} not compared alone, first "
            note += f"{name or 'the model itself'}: {reason}"
        if not items:
            status = "cannot tell" if kind == "outputs" else "skipped"
            return self._check(kind, status, note=note or "there is nothing to compare")
        worst = max(items, key=lambda item: item.excess)
        # In eval, gradients do not count.
        counts = self.mode == "train" or kind == "buffers" or kind.endswith("outputs")
        status = "pass" if not worst.exceeds else "fail" if counts else "wrong"
        check = self._described(status, worst, note=worst.note or note)
        check = replace(check, compared=len(self._alone) if alone else len(items))
        finds = sensitivity(items, by_module=kind == "parameter gradients")
        if finds is None or kind == "buffers" or (alone and self._left_out):
            return check
        return replace(check, sensitivity=finds[0], least_sensitive=finds[1])

    def _described(self, status: str, item: Deviation, **more: Any) -> Check:
        numbers = {"error": finite(item.error), "allowed": finite(item.allowed)}
        return self._check(
            item.kind, status, worst=item.name, **{"note": item.note} | numbers | more
        )

    def _check(self, kind: str, status: str, **more: Any) -> Check:
        """Return a check of this case; `more` are further fields of Check."""
        more |= {"dtype": name_of(self.dtype), "batch": self.call.batch}
        return Check(what=kind, status=status, mode=self.mode, **more)


def _allowed(item: Deviation) -> Deviation:
    """Return the deviation as one that is allowed."""
    return replace(item, allowed=item.error, note="") if item.exceeds else item


def _unsafe_note(run: Run) -> str:
    if run.unsafe is None:
        return ""
    place, issue = run.unsafe
    where = f"the backward of {place or 'the model'} [{issue}]"
    return f"torch may end the process in {where}, so it was not run"


def _may_be_rounding(item: Deviation) -> bool:
    is_small = item.excess <= _AMPLIFIED and not item.is_garbage and not item.note
    return "gradients" in item.kind and is_small and not item.is_factor


def _first_cut(noisy: Run, actual: Run) -> str | None:
    """Return the first module whose arguments or outputs need gradients in one of two runs only."""
    for one, other in zip(noisy.calls, actual.calls, strict=False):
        if one.name != other.name:
            return None
        if (one.needs, one.tracked) != (other.needs, other.tracked):
            return one.name
    return None
