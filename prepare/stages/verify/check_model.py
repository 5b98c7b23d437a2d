"""Verify a prepared model: compare it with the unprepared one, and conclude."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from prepare.core.forward.call import call_of
from prepare.core.forward.input_formatter import CAST_STEP, keep_option
from prepare.core.forward.torch_state import Amp, autocast, device_of, read_amp
from prepare.core.model.devices import free_memory
from prepare.core.model.forward_code import may_read_mode
from prepare.core.model.known_issues import REPAIR_STEP
from prepare.core.model.tensors import (
    is_plain,
    lazy_parameter,
    name_of,
    named_modules,
    named_tensors,
)
from prepare.core.utils.suggest import choose
from prepare.core.utils.text import size
from prepare.errors import RefusedError
from prepare.pipeline.tensor_table import format_steps
from prepare.stages.verify.case import VerificationCase
from prepare.stages.verify.deviations import is_under
from prepare.stages.verify.records import Check, Verification
from prepare.steps.conv_memory_format import SwapsClasses

if TYPE_CHECKING:
    from prepare.pipeline import Pipeline
    from prepare.stages.stage import Mode

_Pairs = dict[str, tuple[Tensor, Tensor]]
# Enough for some twenty steps of a large model; a small one takes a second.
SECONDS = 120.0
# A run may use this part of the free memory.
_FREE_PART = 0.5


def verify(
    reference: nn.Module | Callable[[], nn.Module] | str,
    prepared: nn.Module,
    batch: Any,
    *,
    pipeline: Pipeline | None = None,
    mode: Mode = "eval",
    seconds: float | None = None,
    amp: Amp = "none",
) -> Verification:
    """Check whether `prepared` computes the outputs and gradients of `reference`, within its dtype's error.

    Args:
        reference: the unprepared model with the same weights, e.g. `copy.deepcopy(model)` before `apply`;
            or a function that builds it, for a model that cannot be copied; or a sentence why there is none.
        prepared: the model that `apply` returned. Both models are restored: gradients, buffers, hooks, modes.
        batch: the input of the unprepared model: a tensor, a tuple of positional or a mapping of named
            arguments, or an Example.
        pipeline: the pipeline that prepared the model. It formats the batch, unless the model formats its
            inputs itself, and checks that every tensor still has the wanted device, dtype and layout.
            Without a pipeline, the batch is moved to the prepared model's device and dtype.
        mode: the mode in which the model will be used. In `train`, wrong gradients and buffers fail the
            verification; in `eval` they are reported, and only wrong outputs, and buffers that a forward in
            eval mode changes, fail it.
        seconds: the time limit in seconds; by default 120.
        amp: run the forward of the prepared model under `torch.autocast` to this dtype, with scaled gradients
            for float16. The tolerance is then that of the dtype; the exact run has no autocast.

    The reference runs in float32, and in float64 where something may be wrong: see `case.py`. The tolerance
    follows from its error in the prepared model's dtypes: see `deviations.py`. Where gradients cannot be told
    otherwise, each leaf module is compared alone. Dropout is off, and both models
    draw the same random numbers. A compiled model is compared without the
    compiler, and called once with it; so is a fused one.

    Raises:
        RefusedError: both models are the same object, `mode` or `amp` is unknown, or a lazy
            module has no parameters yet.
    """
    if isinstance(reference, str):
        return Verification(status="cannot tell", reason=reference, mode=mode)
    if not isinstance(reference, nn.Module):
        reference = reference()
    _check_models(reference, prepared, mode)
    amp = read_amp(amp)
    autocast(amp, device_of([prepared]))  # raises if the device has none
    budget, call = Budget(seconds, prepared), call_of(batch).map(Tensor.detach)
    originals = {entry.path: entry.tensor for entry in named_tensors(reference)}
    others = {entry.path: entry.tensor for entry in named_tensors(prepared)}
    pairs = {path: (originals[path], new) for path, new in others.items() if path in originals}
    checks, rewritten = _static_checks(reference, prepared, pairs, pipeline)
    case = VerificationCase(
        reference, prepared, pipeline, amp, budget, rewritten, pairs, call, mode
    )
    # No forward runs if one of these fails, and its own words name the place and the remedy.
    says_itself = any(check.status == "fail" for check in checks)
    checks += [] if says_itself else case.checks()
    first = {check.status: check for check in reversed(checks)}
    status = next((word for word in ("fail", "cannot tell") if word in first), "pass")
    worst = first.get("wrong" if status == "pass" else status)
    bad = first.get("fail") or first.get("wrong")
    culprit = bad.worst if bad and says_itself else case.culprit
    return Verification(
        status=status,
        reason=worst.reason if worst else "",
        mode=mode,
        reference=name_of(case.exact_dtype) if case.deviations else "",
        dtype=name_of(case.dtype),
        checks=tuple(checks),
        culprit=type(prepared).__name__ if culprit == "" else culprit or "",
        advice=_remedy(case) if bad and not says_itself else "",
        amp=amp,
    )


def _check_models(reference: nn.Module, prepared: nn.Module, mode: str) -> None:
    if mode not in ("eval", "train"):
        raise RefusedError("mode", f"{mode!r} is not a mode", choose(mode, ("eval", "train")))
    if prepared is reference:
        remedy = "apply works in place: pass copy.deepcopy(model), taken before apply, as reference"
        raise RefusedError("prepared", "is the same object as the reference", remedy)
    if parameter := lazy_parameter(reference) or lazy_parameter(prepared):
        raise RefusedError(parameter, "this parameter has no shape yet", "run one forward first")


def _remedy(case: VerificationCase) -> str:
    """Return what may help: repair the layout, keep a module in float32, or remove the step."""
    steps = case.pipeline.to_config() if case.pipeline else {}
    wanted = format_steps(case.pipeline.steps.values() if case.pipeline else (), case.reference)
    formats = [name for name, found in wanted.items() if {*found.values()} - {"contiguous"}]
    remedies = []
    if case.wrong_step:
        remedies.append(f"drop the step {case.wrong_step}")
    elif formats and REPAIR_STEP not in steps:
        remedies.append(f"add the step {REPAIR_STEP}")
    if CAST_STEP in steps:
        place = case.culprit or type(case.prepared).__name__
        remedies.append(f"add {keep_option(place)}")
    remedies += [f"drop the step {name}" for name in formats[:1]]
    return f"It may help to {', or '.join(remedies)}." if remedies else ""


class Budget:
    """The seconds and bytes that are left."""

    def __init__(self, seconds: float | None, model: nn.Module) -> None:
        self.seconds = seconds or SECONDS
        self._end = time.monotonic() + self.seconds
        devices = {tensor.device for tensor in model.parameters()} | {torch.device("cpu")}
        self._free = min(filter(None, map(free_memory, devices)), default=None)

    def left(self) -> float:
        """Return the seconds that are left."""
        return self._end - time.monotonic()

    def refuses(self, seconds: float, numbers: float, dtype: torch.dtype) -> str:
        """Say why a run of so many seconds that holds so many numbers does not fit; empty if it fits."""
        run, memory = f"a call in {name_of(dtype)}", int(numbers * dtype.itemsize)
        if self._free is not None and memory > _FREE_PART * self._free:
            what = f"{size(memory)}, but {size(self._free)} are free"
            return f"{run} needs about {what}; make the batch smaller"
        rest = f"{max(self.left(), 0):.0f} of {self.seconds:.0f} s are left"
        takes = f"{run} takes about {seconds:.2g} s, but {rest}; raise verify.seconds"
        return takes if seconds > self.left() else ""


def _static_checks(
    reference: nn.Module, prepared: nn.Module, pairs: _Pairs, pipeline: Pipeline | None
) -> tuple[list[Check], tuple[str, ...]]:
    """Check what needs no forward. Return the checks, and the modules whose tensors a step replaced."""
    rewritten, mode_changed = list[str](), list[str]()
    for action in pipeline.plan(reference, known_issues="ignore").actions if pipeline else ():
        if pipeline is not None and action.phase == "structure":
            step = pipeline.steps[action.step]
            rewritten += [] if getattr(step, "keeps_tensors", False) else action.modules
            # A step may change the mode of modules, but no change of a class does.
            mode_changed += [] if isinstance(step, SwapsClasses) else action.modules
    checks = [_values(reference, prepared, pairs, rewritten)]
    checks.append(_flags(reference, prepared, mode_changed))
    if pipeline is not None:
        drift = [(each.where, str(each)) for each in pipeline.check(prepared)]
        checks.append(_checked("layout", drift, "; apply the pipeline again"))
    return checks, tuple(rewritten)


def _checked(what: str, wrong: Sequence[tuple[str, str]], remedy: str, compared: int = 0) -> Check:
    """Return a check that fails if something is wrong: places with what is wrong there."""
    if not wrong:
        return Check(what=what, status="pass", compared=compared)
    more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
    note = f"{wrong[0][1]}{more}{remedy}"
    return Check(what=what, status="fail", worst=wrong[0][0], note=note, compared=compared)


def _values(
    reference: nn.Module, prepared: nn.Module, pairs: _Pairs, rewritten: Sequence[str]
) -> Check:
    """Check that every tensor equals the reference's, cast to its dtype, bit for bit."""
    paths = {entry.path for model in (reference, prepared) for entry in named_tensors(model)}
    wrong = []
    for path in sorted(path for path in paths if not is_under(path, rewritten)):
        module = path.rpartition(".")[0]
        if path not in pairs:
            wrong.append((module, f"{path} is in only one of the two models"))
        elif not _is_equal(*pairs[path]):
            wrong.append((module, f"{path} differs from the reference's values, cast to its dtype"))
    remedy = "; take copy.deepcopy(model) just before apply, as reference"
    return _checked("values", wrong, remedy, len(pairs))


def _flags(reference: nn.Module, prepared: nn.Module, mode_changed: Sequence[str]) -> Check:
    """Check that the same modules are in training mode, if both models themselves are in the same mode.

    A module whose code never reads a mode may differ: some classes come back from `copy.deepcopy` in
    training mode.
    """
    known = named_modules(reference) if reference.training == prepared.training else ()
    flags = {name: module.training for name, module in known}
    wrong = [
        (name, f"{name} is in another mode than in the reference")
        for name, module in named_modules(prepared)
        if flags.get(name, module.training) != module.training
        and not is_under(name, mode_changed)
        and may_read_mode(module)
    ]
    return _checked("flags", wrong, "; set both to the same mode", len(flags))


def _is_equal(reference: Tensor, prepared: Tensor) -> bool:
    """Return whether a cast gives these values. What is beyond the new range is clamped, and not infinite."""
    if not (is_plain(reference) and is_plain(prepared)):
        return True  # only its class knows the values of such a tensor; the outputs are compared
    if reference.shape != prepared.shape or reference.is_complex() != prepared.is_complex():
        return False
    cast, prepared = reference.detach().to(prepared.device, prepared.dtype), prepared.detach()
    if cast.is_floating_point() and cast.dtype != reference.dtype:
        largest, is_infinite = torch.finfo(cast.dtype).max, reference.isinf().to(cast.device)
        cast = torch.where(is_infinite, cast, cast.clamp(-largest, largest))
    return torch.allclose(cast, prepared, rtol=0.0, atol=0.0, equal_nan=True)
