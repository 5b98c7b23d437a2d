"""Compare the prepared model with the unprepared one: cheap runs first, expensive ones on suspicion.

A run in float64 takes ten times as long as one in float32 where a kernel is missing, as for convolutions in
3-d. So the prepared model is compared with the unprepared one in float32 first. What differs by less than
NEAR of the tolerance also passes against float64: its error there is at most that difference and the error of
the unprepared model, and six times the latter is allowed. Only what differs by more is compared in float64,
module by module, and on other inputs. For 16 bits a run in float32 is exact enough.

A whole model amplifies rounding: a ReLU whose input changes its sign changes single gradients of all layers
before it. So leaf modules are compared alone, on the inputs and gradients that they had in one run of the
prepared model: both take the same side of each kink, and an error in one module stands out at any depth. What
the prepared module computed is what it computed inside of the whole model, so memory that two modules share
shows as well.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from prepare.core.forward.call import tensors_in
from prepare.core.forward.compiled import contains_compiled, eager_if_compiled
from prepare.core.forward.input_formatter import same_casts
from prepare.core.forward.run_example import explained
from prepare.core.forward.torch_state import autocast, device_of
from prepare.core.forward.unchanged import unchanged
from prepare.core.model.devices import free_memory
from prepare.core.model.tensors import name_of
from prepare.core.utils.process_state import ignored_warnings
from prepare.core.utils.text import finite, first_line, plural, size
from prepare.stages.verify import runs
from prepare.stages.verify.deviations import Deviation, compare, is_finite, is_under, sensitivity
from prepare.stages.verify.records import Check
from prepare.stages.verify.runs import KINDS, ModuleCall, Named, Run, cast

if TYPE_CHECKING:
    from prepare.core.forward.call import Call
    from prepare.pipeline import Pipeline

# Up to this part of the tolerance, a difference from a run in float32 needs no run in float64.
_NEAR = 0.4
# A run may use this part of the free memory.
_FREE_PART = 0.5
# A run in float64 may take so many times as long as one in float32.
_SLOWER = 10.0
# Gradients of modules that are right alone may be off by so many times what is allowed: amplified rounding.
_AMPLIFIED = 30.0
# In training, modules run alone if the whole model hides errors of more than this, in 32 and in 16 bits; if
# there is no time for that, errors of more than the last cannot be told.
_BLIND, _BLIND_16, _HIDDEN = 1e-3, 0.05, 0.1
_GRADIENTS, _OF_MODULES = KINDS[1:3], KINDS[2:]
_ALONE = ("module outputs", "module gradients")
# A kernel in float32 may add up many numbers in another order: the floor of its tolerance allows for so many
# layers, 0.008 %, which is far below the errors that are searched for.
_DEPTH = 100
# Within so much of the allowance, what the unprepared module computes in the same dtypes decides: the error
# against float64 is then at most its own error and this, which is always allowed.
_NEAR_ALONE = 0.5
_LATE = "no time was left; raise verify.seconds"
_RANDOM = "returns other outputs with every seed: its dropout and random numbers cannot be fixed"
_IN_EVAL = "over the tolerance, by rounding or by a fault: mode=train tells which"
_UNSTABLE = "the prepared model differs between its own calls, as with memory not initialised"


class UnableError(Exception):
    """The models cannot be compared; the check says why."""

    def __init__(self, note: str, what: str = "outputs", status: str = "cannot tell") -> None:
        super().__init__(note)
        self.check = Check(what=what, status=status, note=note)


@dataclass
class VerificationCase:
    """One call in the mode of use; in `eval`, wrong gradients do not fail.

    `end` is when its time ends, on the clock of `time.monotonic`. `rewritten` names the modules whose tensors
    a structure step replaced, `pairs` holds the tensors that both models have in common.

    After `checks`, `deviations` holds what was compared by its kind, of leaves alone with the module as
    name; `culprit` the first wrong module, `wrong_step` a step that is wrong as a whole, and `exact_dtype`
    the dtype of the exact run.
    """

    reference: nn.Module
    prepared: nn.Module
    pipeline: Pipeline | None
    amp: str
    end: float
    rewritten: tuple[str, ...]
    pairs: dict[str, tuple[Tensor, Tensor]]
    call: Call
    mode: str
    backward: bool = True
    deviations: dict[str, list[Deviation]] = field(default_factory=dict)
    culprit: str | None = None
    wrong_step: str = ""

    def __post_init__(self) -> None:
        tensors = (*self.prepared.parameters(), *self.prepared.buffers())
        dtypes = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
        dtypes |= {getattr(torch, self.amp)} if self.amp != "none" else set()
        #: The coarsest dtype of the prepared model.
        self.dtype = max(dtypes, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)
        self._in_32 = self.dtype == torch.float32
        self.exact_dtype = self.dtype if self.dtype == torch.float64 else torch.float32
        # The part of the tolerance up to which nothing needs a further look.
        self._limit = _NEAR if self._in_32 else 1.0
        self._flags = runs.training_flags(self.prepared, self.mode)
        self._depth = sum(bool(module._parameters) for module in self.prepared.modules())
        self._targets = {id(old): (new.dtype, new.device) for old, new in self.pairs.values()}
        # With hooks on its modules, a model with one of these steps runs other code than without.
        is_fused = any(getattr(m, "rewritten_as", "") == "fused" for m in self.prepared.modules())
        is_compiled = contains_compiled(self.prepared)
        self._whole = "compile" if is_compiled else "fuse_inference" if is_fused else ""
        devices = {tensor.device for tensor in tensors} | {torch.device("cpu")}
        self._free = min(filter(None, map(free_memory, devices)), default=None)
        # Runs whose difference from the exact one is noise.
        self._noisy: list[Run] = []
        self._left_out: dict[str, str] = {}
        self._alone: set[str] = set()

    @property
    def wrong(self) -> list[Deviation]:
        """Return what is off by more than is allowed."""
        return [item for items in self.deviations.values() for item in items if item.exceeds]

    def checks(self) -> list[Check]:
        """Run all models. Return one check for each kind of tensor, or one with the reason for a failure."""
        try:
            return self._compared()
        except UnableError as error:
            if not (self.backward and self.mode == "eval"):
                return [error.check]
            # Gradients do not count there, so the rest is compared without them.
            self.backward, note = False, f"not compared: {error}"
            left = [Check(what=kind, status="skipped", note=note) for kind in _GRADIENTS]
            return [*self.checks(), *left]

    def _compared(self) -> list[Check]:
        first = self._first_call()
        exact, actual = self._exact(self.call), self._prepared(self.call)
        self._noisy = [] if self._in_32 else [self._in_its_dtypes(self.call)]
        self.deviations = self._deviations(exact, actual, self._noisy)
        checks = self._other_calls(first, exact, actual)
        self._allow_amplified()
        if self._open() and not self._noisy:
            self._noisy.append(self._in_its_dtypes(self.call))
            for kind in ("outputs", "buffers"):  # the noise of these is that of the run in float32
                del self._noisy[0].tensors[kind]
            self.deviations = self._deviations(exact, actual, self._noisy)
        found = (self._finds(kind) for kind in _GRADIENTS if self.mode == "train")
        hidden = max((least for least, _ in filter(None, found)), default=0.0)
        if self._open() or hidden > (_BLIND if self._in_32 else _BLIND_16):
            recorded = self._prepared(self.call, record=True)
            names = {c.name for c in recorded.calls if not is_under(c.name, self.rewritten)}
            self.deviations |= self._alone_in(recorded, names)
            self._alone = names - {*self._left_out}
        self._allow_amplified()
        if self._open():
            exact = self._go_exact(first, exact, actual)
            self._allow_amplified()
        if self.wrong and not all(item.is_garbage for item in self.wrong):
            self._look_again()
            self._allow_amplified()
        if self.wrong:
            # Where every module is right alone, the code between them is wrong.
            self.culprit = next(iter(self._wrong_modules()), "")
        if _LATE in self._left_out.values() and hidden > _HIDDEN and not self.wrong:
            checks.append(UnableError(f"not compared: {_LATE}", _ALONE[1]).check)
        return [*(self._judged(*each, exact) for each in self.deviations.items()), *checks]

    # ------------------------------------------------------------------------------------- the runs

    def _prepared(self, call: Call, *, as_used: bool = False, **options: Any) -> Run:
        """Run the prepared model, `as_used` with its compiler and without hooks."""
        # A user formats a batch, unless the prepared model does it.
        if self.pipeline is None or runs.user_formatter(self.pipeline):
            call = runs.format_call(call, self.prepared, self.pipeline)
        compiled = as_used and bool(self._whole)
        with contextlib.nullcontext() if compiled else eager_if_compiled(self.prepared):
            return self._run(self.prepared, call, amp=self.amp, compiled=compiled, **options)

    def _in_its_dtypes(self, call: Call) -> Run:
        """Run the reference in the prepared dtypes, on inputs that differ by what a module may round."""
        # What activations lose here counts as noise, not as an error of the prepared model.
        call = runs.rounded_call(call, self.prepared, self.pipeline)
        given = call.map(runs.nudged).map(lambda tensor: cast(tensor, tensor.dtype))
        with same_casts(self.reference, self.prepared):
            return self._run(
                self.reference, given, repair=self.dtype, stand_in=self._low, amp=self.amp
            )

    def _low(self, tensor: Tensor) -> Tensor:
        """Cast one of the reference's tensors to the prepared model's dtype and device, contiguous."""
        made = cast(tensor, *self._targets.get(id(tensor), (tensor.dtype, tensor.device)))
        # A kernel in float32 rounds at every addition, so its weights differ as the inputs do.
        if self._in_32 and isinstance(made, nn.Parameter):
            made.data = runs.nudged(made.data)
        return made

    def _exact(self, call: Call, **options: Any) -> Run:
        """Run the reference on the user's own inputs, all in `exact_dtype`."""
        convert = partial(cast, dtype=self.exact_dtype)
        options |= {"repair": self.exact_dtype, "stand_in": convert}
        return self._run(self.reference, call.map(convert), **options)

    def _run(self, model: nn.Module, call: Call, **options: Any) -> Run:
        own: Any = {"backward": self.backward, "flags": self._flags}
        try:
            return runs.run_model(model, call, **own | options)
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            text = str(explained(model, error))
            if model is self.prepared:
                raise UnableError(text, "forward", "fail") from error
            raise UnableError(f"the reference raises: {text}", "forward") from error

    def _first_call(self) -> Run:
        """Call the prepared model without a backward: what it takes says whether the others fit."""
        try:
            first = self._prepared(self.call, as_used=True, backward=False, seed=1)
        except UnableError:
            self._exact(self.call)  # it is no fault if the reference raises too
            raise
        if reason := self._refusal(first, torch.float32):
            raise UnableError(reason)
        return first

    def _refusal(self, first: Run, dtype: torch.dtype) -> str:
        """Say why a run of the reference does not fit into the budget; empty if it fits."""
        backward = 1 + self.backward
        weights = sum(tensor.numel() for tensor in self.prepared.parameters())
        seconds = first.seconds * (2 * backward - 1) * (_SLOWER if dtype == torch.float64 else 1)
        memory = int((2 * weights + first.numbers) * backward * dtype.itemsize)
        run, left = f"a call in {name_of(dtype)}", max(self.end - time.monotonic(), 0.0)
        if self._free is not None and memory > _FREE_PART * self._free:
            free = f"{size(self._free)} are free"
            return f"{run} needs about {size(memory)}, but {free}; make the batch smaller"
        takes = f"{run} takes about {seconds:.2g} s, but {left:.0f} s are left"
        return f"{takes}; raise verify.seconds" if seconds > left else ""

    def _deviations(self, exact: Run, actual: Run, noisy: list[Run]) -> dict[str, list[Deviation]]:
        found = {}
        for kind in filter(exact.tensors.__contains__, KINDS):
            left = self.rewritten if kind in _OF_MODULES else ()
            right, given = (
                {name: t for name, t in run.tensors[kind].items() if not is_under(name, left)}
                for run in (exact, actual)
            )
            others = [run.tensors.get(kind, {}) for run in noisy]
            found[kind] = self._compare(kind, right, others, given)
        return found

    def _compare(self, kind: str, exact: Any, noisy: Any, actual: Any) -> list[Deviation]:
        return compare(kind, exact, noisy, actual, dtype=self.dtype, depth=self._depth)

    # -------------------------------------------------------------------------------- further looks

    def _open(self) -> list[Deviation]:
        """Return what may be wrong: more than the limit of what is allowed."""
        limits = {kind: self._limit if kind in KINDS else 1.0 for kind in self.deviations}
        every = [item for items in self.deviations.values() for item in items]
        return [item for item in every if not item.error <= item.allowed * limits[item.kind]]

    def _go_exact(self, first: Run, exact: Run, actual: Run) -> Run:
        """Compare with a run in float64 from now on, if there is none yet and it fits; return the latest."""
        is_open, self._limit = self._limit < 1, 1.0
        if not is_open or self._refusal(first, torch.float64):
            return exact
        self.exact_dtype = torch.float64
        try:
            wide = self._exact(self.call)
        except UnableError:
            self.exact_dtype = torch.float32  # the model makes tensors in float32 itself
            return exact
        self._noisy.append(exact)
        self.deviations |= self._deviations(wide, actual, self._noisy)
        return wide

    def _look_again(self) -> None:
        """Keep what is wrong on slightly different inputs too."""
        moved, names = self.call.map(runs.jittered), self._wrong_modules()
        actual, again = self._prepared(moved, record=bool(names)), {}
        if any(item.kind in KINDS for item in self.wrong):
            again = self._deviations(self._exact(moved), actual, [self._in_its_dtypes(moved)])
        if names:
            again |= self._alone_in(actual, names)
        wrong = {(i.kind, i.name) for items in again.values() for i in items if i.exceeds}
        for items in self.deviations.values():
            for index, item in enumerate(items):
                if not item.is_garbage and (item.kind, item.name) not in wrong:
                    items[index] = _allowed(item)

    def _wrong_modules(self) -> list[str]:
        return list(dict.fromkeys(item.name for item in self.wrong if item.kind in _ALONE))

    def _allow_amplified(self) -> None:
        """Allow the errors of gradients if every module alone is right: the model amplifies rounding.

        In eval, where they do not count, no module runs alone for them, and they are not judged.
        """
        is_right = self._alone and not self._left_out and not self._wrong_modules()
        if (is_right or self.mode == "eval") and all(map(_may_be_rounding, self._open())):
            self._limit = 1.0
            for items in self.deviations.values():
                items[:] = map(_allowed if is_right else _not_judged, items)

    def _other_calls(self, first: Run, exact: Run, actual: Run) -> list[Check]:
        """Call the prepared model once more as it will be used, in training on inputs without gradients.

        Raises:
            UnableError: the outputs differ from call to call.
        """
        graph = self.mode == "train"
        third = self._prepared(self.call, as_used=True, backward=False, graph=graph)
        moved = [item for run in (first, third) for item in self._moved(actual, run)]
        if not moved or any(item.is_garbage for item in self.deviations["outputs"]):
            return []
        second = self._exact(self.call, backward=False, seed=1).tensors["outputs"]
        again = self._compare("outputs", exact.tensors["outputs"], [], second)
        if any(item.exceeds and not math.isnan(item.error) for item in again):
            raise UnableError(f"the reference itself {_RANDOM}")
        if not self._whole:
            raise UnableError(f"{_UNSTABLE}: {moved[0].name} by {moved[0].error:.2g} of its scale")
        if self._moved(first, third):
            raise UnableError(f"with the step {self._whole} it {_RANDOM}")
        self.wrong_step, note = self._whole, f"differs with the step {self._whole}"
        return [_described("fail", replace(moved[0], note=note))]

    def _moved(self, one: Run, other: Run) -> list[Deviation]:
        """Return the outputs that differ between two runs by more than is allowed."""
        allowed = {item.name: item.allowed for item in self.deviations["outputs"]}
        items = self._compare("outputs", one.tensors["outputs"], [], other.tensors["outputs"])
        return [i for i in items if i.exceeds and not i.error <= allowed.get(i.name, 0.0)]

    # --------------------------------------------------------------------------------- modules alone

    def _alone_in(self, run: Run, wanted: Collection[str]) -> dict[str, list[Deviation]]:
        """Compare the recorded calls of the wanted leaves. Return deviations with the module as name."""
        calls: dict[str, list[ModuleCall]] = {}
        for call in run.calls:
            if call.name in wanted:
                calls.setdefault(call.name, []).append(call)
        low = self._run_alone(calls, self._low, self.amp)
        items = {name: self._of_module(run, calls[name], low[name]) for name in low}
        # A wrong output may come from a module that is as wrong in the unprepared model.
        may_be_near = not any(item.kind in ("outputs", "buffers") for item in self.wrong)
        for name, near in items.items():
            if may_be_near and all(i.error <= _NEAR_ALONE * i.allowed for i in near):
                del calls[name]
        exact = self._run_alone(calls, partial(cast, dtype=torch.float64))
        for name in exact:
            items[name] = self._of_module(run, calls[name], exact[name], low[name])
        found: dict[str, list[Deviation]] = {kind: [] for kind in _ALONE[: 1 + self.backward]}
        for name, own in items.items():
            for item in own if name not in self._left_out else ():
                # What a module leaves in its buffers counts as an output.
                kind = item.kind if item.kind in _ALONE else _ALONE[0]
                found[kind].append(replace(item, kind=kind, name=name))
        return found

    def _of_module(
        self, run: Run, calls: list[ModuleCall], exact: Any, *noisy: Any
    ) -> list[Deviation]:
        """Compare what a module computed in a run with what the reference computes alone."""
        head = f"{calls[0].name}." if calls[0].name else ""
        given: dict[str, Named] = {kind: {} for kind in exact}
        for index, call in enumerate(calls):
            for kind, named in zip(_ALONE, (call.outputs, call.input_gradients), strict=True):
                given[kind] |= {f"{index}.{place}": tensor for place, tensor in named.items()}
        found, depth = [], _DEPTH if self._in_32 else 1
        for kind, right in exact.items():
            whole = run.tensors.get("buffers" if kind == "buffers" else "parameter gradients", {})
            own = {name: whole[head + name] for name in right if head + name in whole}
            actual = {name: t for name, t in (given[kind] | own).items() if name in right}
            if all(map(is_finite, right.values())):
                others = [each[kind] for each in noisy]
                found += compare(kind, right, others, actual, dtype=self.dtype, depth=depth)
        return found

    def _run_alone(
        self, calls: dict[str, list[ModuleCall]], convert: Any, amp: str = "none"
    ) -> dict[str, dict[str, Named]]:
        """Call modules of the reference on recorded arguments, all tensors converted."""
        model, found = self.reference, dict[str, dict[str, Named]]()
        with (
            ignored_warnings(),
            unchanged(model, stand_in=convert),
            same_casts(model, self.prepared),
            runs.repaired(model, self.dtype),
        ):
            runs.make_deterministic(model, self._flags)
            # Another module that holds the same Parameter adds to its gradient.
            owners = Counter(id(p) for m in model.modules() for p in m._parameters.values())
            shared = {each for each, count in owners.items() if count > 1}
            for name, own in calls.items():
                try:
                    if time.monotonic() > self.end:
                        raise TimeoutError(_LATE)
                    module = model.get_submodule(name)
                    found[name] = self._call_alone(module, own, convert, shared, amp)
                except Exception as error:  # the module's code may depend on the code around it
                    self._left_out[name] = first_line(error)
        return found

    def _call_alone(
        self, module: nn.Module, calls: list[ModuleCall], convert: Any, shared: set[int], amp: str
    ) -> dict[str, Named]:
        outputs, gradients, leaves = Named(), Named(), list[Tensor]()
        mine = {
            n: p for n, p in module.named_parameters() if p.requires_grad and id(p) not in shared
        }

        def leaf(tensor: Tensor) -> Tensor:
            made = convert(tensor.detach())
            leaves.append(made.requires_grad_(self.backward and made.is_floating_point()))
            return made.clone()

        for index, call in enumerate(calls):
            leaves.clear()
            with torch.set_grad_enabled(self.backward), runs.SameNumbers() as numbers:
                given = call.arguments.map(leaf)
                with autocast(amp, device_of([module], leaves)):
                    result = list(tensors_in(module(*given.args, **given.kwargs)))
            if call.is_twice or numbers.draws:
                raise RuntimeError("the forward differentiates, or draws random numbers")
            outputs |= {f"{index}.{place}": output.detach() for place, output in enumerate(result)}
            known = call.output_gradients
            heads = {p: t for p, t in enumerate(result) if p in known and t.requires_grad}
            into = {**mine, **{f"{index}.{place}": leaves[place] for place in call.input_gradients}}
            if heads and into:
                grads = [known[place].to(t.dtype).contiguous() for place, t in heads.items()]
                roots, ends = [*heads.values()], [*into.values()]
                made = torch.autograd.grad(roots, ends, grads, allow_unused=True)
                for name, gradient in zip(into, made, strict=True):
                    if gradient is not None:
                        gradients[name] = gradients.get(name, 0) + gradient
        buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
        return dict(zip((*_ALONE, "buffers"), (outputs, gradients, buffers), strict=True))

    # --------------------------------------------------------------------------------- the judgement

    def _finds(self, kind: str) -> tuple[float, str] | None:
        """Return the least error that is found everywhere, and where the most of it hides."""
        return sensitivity(self.deviations.get(kind, ()), by_module=kind == "parameter gradients")

    def _judged(self, kind: str, items: list[Deviation], exact: Run) -> Check:
        for name, tensor in exact.tensors.get(kind, {}).items():
            if not is_finite(tensor):
                return replace(UnableError("the reference is not finite", kind).check, worst=name)
        if kind == "outputs" and not any(item.size or item.exceeds for item in items):
            return UnableError("they are all zero" if items else "there are none").check
        alone, left, note = kind in _ALONE, self._left_out, ""
        if alone and left:
            first = next(iter(left))
            note = f"{plural(len(left), 'module')} not compared alone, {first}: {left[first]}"
        if not items:
            return Check(what=kind, status="skipped", note=note or "there is nothing to compare")
        worst = max(items, key=lambda item: (item.note == _IN_EVAL, item.excess))
        if worst.note == _IN_EVAL:
            return _described("skipped", worst)
        # In eval, gradients do not count.
        bad = "wrong" if self.mode == "eval" and kind.endswith("gradients") else "fail"
        worst = replace(worst, note=worst.note or note)
        check = _described(bad if worst.exceeds else "pass", worst)
        check = replace(check, compared=len(self._alone) if alone else len(items))
        finds = None if kind == "buffers" or (alone and left) else self._finds(kind)
        return replace(check, sensitivity=finds[0], least_sensitive=finds[1]) if finds else check


def _described(status: str, item: Deviation) -> Check:
    about: Any = {"error": finite(item.error), "allowed": finite(item.allowed), "note": item.note}
    return Check(what=item.kind, status=status, worst=item.name, **about)


def _allowed(item: Deviation) -> Deviation:
    """Return the deviation as one that is allowed."""
    return replace(item, allowed=item.error, note="") if item.exceeds else item


def _not_judged(item: Deviation) -> Deviation:
    """Return the deviation without a tolerance, if it is larger."""
    return replace(item, allowed=math.inf, note=_IN_EVAL) if item.exceeds else item


def _may_be_rounding(item: Deviation) -> bool:
    is_small = item.excess <= _AMPLIFIED and not item.is_garbage and not item.note
    return "gradients" in item.kind and is_small and not item.is_factor
