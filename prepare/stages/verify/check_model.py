"""Verify a prepared model: compare it with the unprepared one, and conclude."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from prepare.core.forward.call import call_of
from prepare.core.forward.input_formatter import CAST_STEP, keep_option
from prepare.core.forward.torch_state import Amp, autocast, device_of, read_amp
from prepare.core.model.known_issues import REPAIR_STEP
from prepare.core.model.tensors import lazy_parameter, name_of
from prepare.core.utils.machine import environment
from prepare.core.utils.suggest import choose
from prepare.errors import RefusedError
from prepare.pipeline.tensor_table import format_steps
from prepare.stages.verify.budget import Budget
from prepare.stages.verify.case import VerificationCase
from prepare.stages.verify.records import Check, Verification, unknown
from prepare.stages.verify.static_checks import static_checks, tensor_pairs

if TYPE_CHECKING:
    from prepare.pipeline import Pipeline
    from prepare.stages.stage import Mode


def verify(
    reference: nn.Module | Callable[[], nn.Module] | str,
    prepared: nn.Module,
    batch: Any,
    *,
    pipeline: Pipeline | None = None,
    mode: Mode = "eval",
    gradients: bool = True,
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
        gradients: compare gradients in mode `eval` too, where they are only reported.
        seconds: the time limit in seconds; by default 30, up to 300 for a large model.
        amp: run the forward of the prepared model under `torch.autocast` to this dtype, with scaled gradients
            for float16. The tolerance is then that of the dtype; the exact run has no autocast.

    The reference runs in float32, and in float64 where something may be wrong: see `case.py`. The tolerance
    follows from its error in the prepared model's dtypes: see `deviations.py`. Where gradients cannot be told
    otherwise, each leaf module is compared alone: see `modules_alone.py`. Dropout is off, and both models
    draw the same random numbers. A compiled or fused model is compared
    with hooks on its modules, and called once more as it is used.

    Raises:
        RefusedError: both models are the same object, `mode` or `amp` is unknown, mode `train` is
            requested without gradients, or a lazy module has no parameters yet.
    """
    if isinstance(reference, str):
        return unknown(reference, mode=mode)
    if not isinstance(reference, nn.Module):
        reference = reference()
    _check_arguments(reference, prepared, mode=mode, gradients=gradients)
    amp = read_amp(amp)
    autocast(amp, device_of([prepared]))  # raises if the device has none
    budget, call = Budget(seconds, prepared), call_of(batch).map(Tensor.detach)
    pairs = tensor_pairs(reference, prepared)
    checks, rewritten = static_checks(reference, prepared, pairs, pipeline)
    case = VerificationCase(
        reference, prepared, pipeline, amp, budget, rewritten, pairs, call, mode, gradients
    )
    if all(check.status != "fail" for check in checks):
        checks += case.checks()
    first = {check.status: check for check in reversed(checks)}
    status = next((word for word in ("fail", "cannot tell") if word in first), "pass")
    worst = first.get("wrong" if status == "pass" else status)
    bad = [check for check in checks if check.status in ("fail", "wrong")]
    culprit = case.culprit
    if bad and culprit is None and not bad[0].mode:
        place = bad[0].worst
        culprit = place.rpartition(".")[0] if bad[0].what == "values" else place
    # Values, flags and layout say themselves what to do.
    is_computed = any(check.mode for check in bad)
    return Verification(
        status=status,
        reason=worst.reason if worst else "",
        mode=mode,
        reference=name_of(case.exact_dtype) if case.deviations else "",
        checks=tuple(checks),
        culprit=type(prepared).__name__ if culprit == "" else culprit or "",
        advice=_remedy(case, bad, culprit) if is_computed else "",
        seconds=round(budget.spent(), 3),
        environment=environment(),
        amp=amp,
    )


def _check_arguments(
    reference: nn.Module, prepared: nn.Module, *, mode: str, gradients: bool
) -> None:
    wrong = None
    if mode not in ("eval", "train"):
        wrong = "mode", f"{mode!r} is not a mode", choose(mode, ("eval", "train"))
    elif mode == "train" and not gradients:
        wrong = "gradients", "mode 'train' requires them", "leave out gradients=False"
    elif prepared is reference:
        remedy = "apply works in place: pass copy.deepcopy(model), taken before apply, as reference"
        wrong = "prepared", "is the same object as the reference", remedy
    elif parameter := lazy_parameter(reference) or lazy_parameter(prepared):
        wrong = parameter, "this parameter has no shape yet", "run one forward first"
    if wrong:
        raise RefusedError(*wrong)


def _remedy(case: VerificationCase, bad: Sequence[Check], culprit: str | None) -> str:
    """Return what may help: repair the layout, keep a module in float32, or remove the step."""
    steps = case.pipeline.to_config() if case.pipeline else {}
    wanted = format_steps(case.pipeline.steps.values() if case.pipeline else (), case.reference)
    formats = [name for name, found in wanted.items() if {*found.values()} - {"contiguous"}]
    remedies = []
    whole = {"compiled": "compile", "fused": "fuse_inference"}
    if found := [whole[check.inputs] for check in bad if check.inputs in whole]:
        remedies.append(f"drop the step {found[0]}")
    elif formats and REPAIR_STEP not in steps:
        remedies.append(f"add the step {REPAIR_STEP}")
    if CAST_STEP in steps:
        remedies.append(f"add {keep_option(culprit or type(case.prepared).__name__)}")
    remedies += [f"drop the step {name}" for name in formats[:1]]
    return f"It may help to {', or '.join(remedies)}." if remedies else ""
