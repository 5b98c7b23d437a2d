"""Compare every leaf module alone, on the inputs and gradients that it had in one run of the prepared model.

A whole model amplifies rounding: a ReLU whose input changes its sign changes single gradients of all layers
before it. Alone, a module and its reference get exactly the same numbers, so both take the same
side of each kink, and an error in one module stands out at any depth. What the prepared module computed is
what it computed inside of the whole model, so memory that two modules share shows as well.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from prepare.core.forward.call import tensors_in
from prepare.core.forward.input_formatter import same_casts
from prepare.core.forward.torch_state import autocast, device_of
from prepare.core.forward.unchanged import unchanged
from prepare.core.utils.process_state import ignored_warnings
from prepare.core.utils.text import first_line
from prepare.stages.verify import runs
from prepare.stages.verify.deviations import Deviation, compare, is_finite
from prepare.stages.verify.runs import Named

if TYPE_CHECKING:
    from prepare.stages.verify.case import VerificationCase

MODULE_KINDS = ("module outputs", "module gradients")
# A kernel in float32 may add up many numbers in another order: the floor of its tolerance allows for so many
# layers, 0.008 %, which is far below the errors that are searched for.
_DEPTH = 100
# Within so much of the allowance, what the unprepared module computes in the same dtypes decides: the error
# against float64 is then at most its own error and this, which is always allowed.
_NEAR = 0.5


def compare_alone(
    case: VerificationCase, run: runs.Run, wanted: Collection[str]
) -> tuple[dict[str, list[Deviation]], dict[str, str]]:
    """Compare the recorded calls of the wanted leaves, by name.

    Return the deviations by kind, with the module as name, and why some modules were left out.
    """
    found, left_out = {kind: list[Deviation]() for kind in MODULE_KINDS}, dict[str, str]()
    calls: dict[str, list[runs.ModuleCall]] = {}
    for call in filter(lambda call: call.name in wanted, run.calls):
        calls.setdefault(call.name, []).append(call)
    in_float64 = unchanged(case.reference, stand_in=partial(runs.cast, dtype=torch.float64))
    quiet = ignored_warnings("the tensors in a .* stay as they are")
    casts = same_casts(case.reference, case.prepared)
    with quiet, in_float64, casts, runs.repaired(case.reference, case.dtype):
        runs.make_deterministic(case.reference, case.flags)
        modules = case.reference.modules()
        owners = Counter(id(p) for m in modules for p in m._parameters.values())
        for name in list(calls):
            try:
                if any(call.is_twice for call in calls[name]):
                    raise RuntimeError("the forward differentiates")
                if case.budget.left() < 0:
                    raise TimeoutError("no time was left; raise verify.seconds")
                items = _compare(case, name, calls.pop(name), run, owners)
            except (MemoryError, torch.OutOfMemoryError):
                raise
            except Exception as error:  # the module's code may depend on the code around it
                left_out[name] = first_line(error)
                continue
            for item in items:
                kind = item.kind if item.kind in MODULE_KINDS else MODULE_KINDS[0]
                found[kind].append(replace(item, kind=kind, name=name))
    return found, left_out


def _compare(
    case: VerificationCase,
    name: str,
    calls: list[runs.ModuleCall],
    run: runs.Run,
    owners: Counter[int],
) -> list[Deviation]:
    module, head = case.reference.get_submodule(name), f"{name}." if name else ""
    # Another module that holds the same Parameter adds to its gradient.
    shared = {key for key, p in module.named_parameters() if owners[id(p)] > 1}
    buffers = [key for key, _ in module.named_buffers()]
    own = [key for key, _ in module.named_parameters() if key not in shared]
    gradients = run.tensors.get("parameter gradients", {})
    outputs, inputs = (
        {f"{index}.{place}": t for index, call in enumerate(calls) for place, t in kind(call)}
        for kind in (lambda call: call.outputs.items(), lambda call: call.input_gradients.items())
    )
    actual = {
        "module outputs": outputs,
        "module gradients": inputs | {k: gradients[head + k] for k in own if head + k in gradients},
        "buffers": {k: run.tensors["buffers"][head + k] for k in buffers},
    }

    def lone(dtype: torch.dtype | None, amp: str = "none") -> dict[str, Named]:
        """Run it in one dtype or, without one, in those of the prepared model."""
        weights = {}
        for key, tensor in (*module.named_parameters(), *module.named_buffers()):
            target = (dtype,) if dtype else case.targets.get(head + key, (tensor.dtype,))
            made = runs.cast(tensor.detach(), *target)
            weights[key] = made.requires_grad_(tensor.requires_grad)
        with torch.set_grad_enabled(case.backward), runs.SameNumbers():
            return _run_alone(module, calls, weights, dtype, amp)

    def deviations(exact: dict[str, Named], noisy: dict[str, Named]) -> list[Deviation]:
        found = []
        for kind, named in exact.items():
            right = {n: t for n, t in named.items() if n not in shared}
            if all(map(is_finite, right.values())):
                given = {n: t for n, t in actual[kind].items() if n in right}
                # The statistics of a norm that stays in float32 have the digits of float32.
                dtypes = {t.dtype for t in given.values() if t.is_floating_point()}
                kept = kind == "buffers" and dtypes == {torch.float32}
                dtype = torch.float32 if kept else case.dtype
                depth = _DEPTH if dtype == torch.float32 else 1
                others = [noisy[kind]] if noisy else []
                found += compare(kind, right, others, given, dtype=dtype, depth=depth)
        return found

    # A wrong output may come from a module that is as wrong in the unprepared model.
    may_be_near = not any(item.kind in ("outputs", "buffers") for item in case.wrong)
    low = lone(None, case.amp)
    near = deviations(low, {})
    if may_be_near and near and all(item.error <= _NEAR * item.allowed for item in near):
        return near
    return deviations(lone(torch.float64), low)


def _run_alone(
    module: nn.Module,
    calls: list[runs.ModuleCall],
    weights: Named,
    dtype: torch.dtype | None,
    amp: str,
) -> dict[str, Named]:
    """Call a module on recorded arguments, in their dtypes or in one, and sum the gradients of the calls."""
    outputs, gradients, backward = Named(), Named(), torch.is_grad_enabled()

    def convert(leaves: list[Tensor], tensor: Tensor) -> Tensor:
        made = runs.cast(tensor.detach(), dtype or tensor.dtype)
        leaves.append(made.requires_grad_(backward and made.is_floating_point()))
        return made.clone()

    for index, call in enumerate(calls):
        leaves: list[Tensor] = []
        given = call.arguments.map(partial(convert, leaves))
        with autocast(amp, device_of([module], given.tensors())):
            result = functional_call(module, weights, given.args, given.kwargs)
        wanted = {n: tensor for n, tensor in weights.items() if tensor.requires_grad}
        for place, leaf in enumerate(leaves):
            if place in call.input_gradients or call.needs[place]:
                wanted[f"{index}.{place}"] = leaf
        roots: list[tuple[Any, Any]] = []
        for place, output in enumerate(tensors_in(result)):
            outputs[f"{index}.{place}"] = output.detach()
            if output.requires_grad and (grad := call.output_gradients.get(place)) is not None:
                roots.append((output, grad.to(output.dtype).contiguous()))
        if roots and wanted:
            heads, grads = zip(*roots, strict=True)
            found = torch.autograd.grad(heads, [*wanted.values()], grads, allow_unused=True)
            for name, gradient in zip(wanted, found, strict=True):
                if gradient is not None:
                    known = gradients.get(name)
                    gradients[name] = gradient if known is None else known + gradient
    buffers = {name: weights[name] for name, _ in module.named_buffers()}
    return {"module outputs": outputs, "module gradients": gradients, "buffers": buffers}
