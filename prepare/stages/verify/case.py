"""Compare the prepared model with the unprepared one on one call in one mode, and judge what differs."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from prepare.core.forward.explain_error import explained
from prepare.core.forward.float32_calls import same_casts
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
from prepare.stages.verify.inputs import format_call, jittered, nudged, user_call
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
# Other gradients on inputs without gradients count if they are wrong by so many times what is allowed.
_CLEARLY = 4.0
# The factors of gradients under autocast to float16: that of GradScaler, and smaller ones if they overflow.
_SCALES = (2.0**16, 2.0**8, 1.0)
_GRADIENTS, _OF_MODULES = KINDS[1:3], KINDS[2:]
_RANDOM = "returns other outputs with every seed: its dropout and random numbers cannot be fixed"
_UNSTABLE = (
    "the prepared model differs between its own calls, as with a race, memory that was not initialised, or a "
    "kernel that depends on threads"
)

_Runs = tuple[Run, list[Run], Run]


class CannotTellError(Exception):
    """The models cannot be compared; the message says why."""


class RunError(Exception):
    """A model raised; the message explains the error, `whose` says which model."""

    def __init__(self, text: str, whose: str) -> None:
        super().__init__(text)
        self.whose = whose


@dataclass
class VerificationCase:
    """One call in one mode, and the `use` of the model: in `eval`, wrong gradients do not fail.

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
    use: str
    backward: bool
    inputs: str = ""
    compiled: bool = False
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
        self._scale = _SCALES[0] if self.amp == "float16" and self.backward else 1.0
        self._graph = self._lacks_kernel = False
        self._left_out: dict[str, str] = {}
        self._alone: set[str] = set()

    @property
    def _trains(self) -> bool:
        return self.mode == self.use == "train" and not self.compiled

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
            if self.backward and self.use == "eval":
                self.backward = False
                self._skipped = f"the backward of the {error.whose} raises: {error}"
                return self.checks()
            if error.whose == "prepared model":
                self.raised = str(error)
                return [self._check("forward", "fail", note=self.raised)]
            status = "skipped" if self.inputs else "cannot tell"
            return [self._check("forward", status, note=f"the reference raises: {error}")]

    def _compared(self) -> list[Check]:
        first = self._first_call()
        wide = not self._refusal(first, torch.float64)
        self.exact_dtype = torch.float64 if wide else torch.float32
        exact, (noisy, *_), actual = runs = self._all_runs(self.call)
        if self.backward and noisy.unsafe is not None:
            raise CannotTellError(f"{_unsafe_text(noisy)} of the unprepared model")
        self.unsafe = actual.unsafe if self.backward else None
        self.deviations = self._deviations(*runs)
        more = self._other_calls(first, noisy, actual)
        is_zero = not any(map(largest, exact.tensors["outputs"].values()))
        # In a forward that differentiates, gradients pass its modules more than once.
        may_be_alone = not self.compiled and not self._graph
        if may_be_alone and (self._trains or self.wrong or is_zero or not wide):
            names = {c.name for c in actual.calls if not is_under(c.name, self.rewritten)}
            alone, self._left_out = compare_alone(self, actual, names)
            self._alone = names - {*self._left_out}
            self.deviations |= {k: alone[k] for k in MODULE_KINDS[: 1 + self.backward]}
        if self.wrong:
            self._look_again()
            self._allow_amplified(noisy, actual)
            self.culprit = self._first_wrong(noisy, actual) if self.wrong else None
        checks = [self._judged(kind, items, exact) for kind, items in self.deviations.items()]
        if is_zero:
            right = any(item.size for item in self.deviations.get(MODULE_KINDS[0], ()))
            right = right and not self._left_out and not self._wrong_modules()
            note = f"{ALL_ZERO}; each module alone is right" if right else ALL_ZERO
            status = "skipped" if right or self.inputs else "cannot tell"
            checks[0] = replace(checks[0], status=status, note=note, worst="")
        if note := self._skipped or (
            f"{_unsafe_text(actual)}, so it was not run" if self.unsafe else ""
        ):
            status = "fail" if self.use == "train" else "skipped"
            more += [self._check(kind, status, note=note) for kind in _GRADIENTS]
        return checks + more

    # ------------------------------------------------------------------------------------- the runs

    def _prepared(self, call: Call, **options: Any) -> Run:
        call = user_call(call, self.prepared, self.pipeline)
        stand_in = compiled_stand_in if self.compiled else same_stand_in
        options |= {"amp": self.amp, "scale": self._scale, "compiled": self.compiled}
        return self._run(self.prepared, call, stand_in, **options)

    def _noisy(self, call: Call, **options: Any) -> Run:
        """Run the reference in the prepared dtypes or, where torch lacks a kernel, with rounded outputs."""
        call = format_call(call, self.prepared, self.pipeline).map(nudged)
        options |= {"repair": self.dtype, "scale": self._scale}
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

    def _exact(self, call: Call, **options: Any) -> Run:
        wide, convert = self.exact_dtype == torch.float64, partial(cast, dtype=self.exact_dtype)
        options |= {"repair": self.exact_dtype, "wide": wide}
        try:
            return self._run(self.reference, call.map(convert), convert, **options)
        except RunError:
            if not wide:
                raise
            self.exact_dtype = torch.float32  # the model casts to float32 itself
            return self._exact(call, **options)

    def _run(self, model: nn.Module, *what: Any, **options: Any) -> Run:
        own: Any = {"backward": self.backward, "graph": self._graph, "flags": self.flags}
        try:
            return run_model(model, *what, **own | options)
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            whose = "prepared model" if model is self.prepared else "reference"
            raise RunError(str(explained(model, error)), whose) from error

    def _all_runs(self, call: Call, record: str = "leaves") -> _Runs:
        """Run the exact, the unprepared and the prepared model."""
        noisy = self._noisy(call, record=record)
        while self._scale > 1.0 and not all(map(is_finite, noisy.tensors[_GRADIENTS[1]].values())):
            self._scale = _SCALES[_SCALES.index(self._scale) + 1]  # a GradScaler skips such a step
            noisy = self._noisy(call, record=record)
        exact = self._exact(call, record=record if record == "all" else "")
        return exact, [noisy], self._prepared(call, record=record)

    def _first_call(self) -> Run:
        """Call the prepared model without a backward: what it takes says whether the others fit."""
        try:
            first = self._prepared(self.call, backward=False, seed=1)
        except RunError:
            self._graph = True  # a forward that differentiates, as that of a force field
            self._exact(self.call)  # it is no fault if the reference raises too
            first = self._prepared(self.call, backward=False, seed=1)
        self.budget.extend(first.seconds * (3 if self.mode == "train" else 1))
        reason = self._refusal(first, torch.float32)
        if reason and self.backward and self.use == "eval":
            self._skipped, self.backward = f"not compared: {reason}", False
            reason = self._refusal(first, torch.float32)
        if reason:
            raise CannotTellError(reason)
        return first

    def _refusal(self, first: Run, dtype: torch.dtype) -> str:
        """Say why a run of the reference does not fit into the budget; empty if it fits."""
        wide, backward = dtype == torch.float64, 1 + self.backward
        weights = sum(tensor.numel() for tensor in self.prepared.parameters())
        numbers = (2 * weights + first.numbers) * backward + (2 * first.unfolded if wide else 0)
        seconds = first.seconds * (2 * backward - 1) * (_SLOWER if wide else 1)
        return self.budget.refuses(seconds, numbers, dtype)

    def _deviations(self, *runs: Any) -> dict[str, list[Deviation]]:
        exact, noisy, actual = runs
        found = {}
        for kind in ("outputs",) if self.compiled and self.use == "eval" else KINDS:
            if kind not in exact.tensors or kind not in actual.tensors:
                continue
            right, *others, given = (run.tensors[kind] for run in (exact, *noisy, actual))
            if kind in _OF_MODULES and self.rewritten:
                right, given = (
                    {n: t for n, t in named.items() if not is_under(n, self.rewritten)}
                    for named in (right, given)
                )
            found[kind] = self._compare(kind, right, others, given)
        return found

    def _compare(self, kind: str, *named: Any) -> list[Deviation]:
        return compare(kind, *named, dtype=self.dtype, depth=self._depth)

    # -------------------------------------------------------------------------------- further looks

    def _look_again(self) -> None:
        """Keep what is wrong on slightly different inputs too, beyond the noise of a perturbed forward.

        Rounding may flip the sign of a ReLU's input, or change the maximum of a pooling window. A module that
        is as wrong in the unprepared model does not count.
        """
        if all(item.is_garbage for item in self.wrong):
            return
        moved = self.call.map(partial(jittered, seed=1))
        exact, noisy, actual = self._all_runs(moved)
        shake = partial(jittered, seed=2, fraction=rounding_step(self.dtype))
        noisy.append(self._noisy(moved, change=shake))
        again, names = self._deviations(exact, noisy, actual), self._wrong_modules()
        if names:
            again |= compare_alone(self, actual, names)[0]
        wrong = {(i.kind, i.name) for items in again.values() for i in items if i.exceeds}
        if names and not self._lacks_kernel:
            own = compare_alone(self, noisy[0], names)[0].values()
            wrong -= {(i.kind, i.name) for items in own for i in items if i.exceeds}
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
        if self.compiled or (name := _first_cut(noisy, actual)) is not None:
            return None if self.compiled else name
        if self.budget.left() > 0 and (name := self._first_between()) is not None:
            return name
        owners = [i.name.rpartition(".")[0] for i in self.wrong if i.kind in _OF_MODULES]
        return next(iter(owners), None)

    def _first_between(self) -> str | None:
        """Return the first module whose code, between the calls in it, computes something else."""
        exact, noisy, actual = self._all_runs(self.call, "all")
        named = [run.by_call() for run in (exact, *noisy, actual)]
        common = [key for key in named[-1] if all(key in calls for calls in named)]
        for part, kind in (("outputs", "outputs"), ("output_gradients", KINDS[1])):
            right, low, given = (
                {
                    f"{number} {place}": tensor
                    for number, key in enumerate(common)
                    for place, tensor in getattr(calls[key], part).items()
                }
                for calls in named
            )
            items = self._compare(
                kind, right, [low], {n: t for n, t in given.items() if n in right}
            )
            wrong = [int(item.name.partition(" ")[0]) for item in items if item.exceeds]
            if wrong:
                first = common[min(wrong)][0], common[max(wrong)][0].rpartition(".")[0]
                return first[kind != "outputs"]
        return None

    def _other_calls(self, first: Run, noisy: Run, actual: Run) -> list[Check]:
        """Call the prepared model once more: as training does, on inputs that need no gradient.

        Raises:
            CannotTellError: the outputs differ from call to call.
        """
        frozen = self._trains and self.unsafe is None and bool(actual.tensors[_GRADIENTS[0]])
        third, kind = self._prepared(self.call, backward=frozen, frozen=frozen), _GRADIENTS[1]
        moved = [i for run in (first, third) for i in self._moved("outputs", actual, run)]
        if any(item.is_garbage for item in self.deviations["outputs"]):
            moved = []
        if moved or any(item.allowed == FACTOR * item.noise for item in self.deviations["outputs"]):
            second = self._noisy(self.call, backward=False, seed=1).tensors["outputs"]
            again = self._compare("outputs", noisy.tensors["outputs"], [], second)
            if any(item.exceeds and not math.isnan(item.error) for item in again):
                raise CannotTellError(f"the reference itself {_RANDOM}")
        given: Any = {"inputs": "inputs without gradients"}
        for item in moved:
            if item.note:
                return [self._described("fail", replace(item, note=f"{item.note} in another call"))]
            off = f"{item.name} by {item.error:.2g} of its scale"
            raise CannotTellError(
                f"the compiled model {_RANDOM}" if self.compiled else f"{_UNSTABLE}: {off}"
            )
        if changed := actual.changed - noisy.changed:
            note = "is changed in place, and the reference does not change it"
            return [self._check("batch", "fail", worst=min(changed), note=note)]
        if third.unsafe is not None and frozen:
            self.unsafe, note = third.unsafe, f"{_unsafe_text(third)}, so it was not run"
            return [self._check(kind, "fail", note=note, **given)]
        if frozen and (found := self._moved(kind, actual, third, _CLEARLY)):
            # A checkpoint, or code of the model, may give no gradient for such inputs in both models.
            own = self._noisy(self.call, frozen=True)
            names = {item.name for item in self._moved(kind, own, third, _CLEARLY)}
            found = [item for item in found if item.name in names][:1]
            return [self._described("fail", item, **given) for item in found]
        return []

    def _moved(self, kind: str, one: Run, other: Run, times: float = 1.0) -> list[Deviation]:
        """Return what differs between two runs by so many times what is allowed."""
        allowed = {item.name: times * item.allowed for item in self.deviations[kind]}
        items = self._compare(kind, one.tensors[kind], [], other.tensors[kind])
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
        status = "pass" if not worst.exceeds else "fail" if self._counts(kind) else "wrong"
        check = self._described(status, worst, note=worst.note or note)
        check = replace(check, compared=len(self._alone) if alone else len(items))
        finds = sensitivity(items, by_module=kind == "parameter gradients")
        if finds is None or kind == "buffers" or (alone and self._left_out):
            return check
        return replace(check, sensitivity=finds[0], least_sensitive=finds[1])

    def _counts(self, kind: str) -> bool:
        """Return True if a wrong tensor of this kind fails the verification; in eval, gradients do not."""
        is_buffer_of_eval = kind == "buffers" and self.mode == "eval"
        return kind.endswith("outputs") or self.use == "train" or is_buffer_of_eval

    def _described(self, status: str, item: Deviation, **more: Any) -> Check:
        more = {
            "note": item.note,
            "error": finite(item.error),
            "allowed": finite(item.allowed),
        } | more
        return self._check(item.kind, status, worst=item.name, **more)

    def _check(self, kind: str, status: str, *, inputs: str = "", **more: Any) -> Check:
        """Return a check of this case; `more` are further fields of Check."""
        parts = self.inputs, "compiled" if self.compiled else "", inputs
        more |= {"inputs": ", ".join(filter(None, parts)), "dtype": name_of(self.dtype)}
        return Check(what=kind, status=status, mode=self.mode, batch=self.call.batch, **more)


def _allowed(item: Deviation) -> Deviation:
    """Return the deviation as one that is allowed."""
    return replace(item, allowed=item.error, note="") if item.exceeds else item


def _unsafe_text(run: Run) -> str:
    place, issue = run.unsafe or ("", "")
    return f"torch may end the process in the backward of {place or 'the model'} [{issue}]"


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
