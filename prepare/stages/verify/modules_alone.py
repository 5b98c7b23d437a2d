"""Compare every leaf module alone, on the inputs and gradients that it had in one run of the prepared model.

A whole model amplifies rounding: a ReLU whose input changes its sign changes single gradients of all layers
before it. Alone, a module and its reference get exactly the same numbers, so both take the same
side of each kink, and an error in one module stands out at any depth. What the prepared module computed is
what it computed inside of the whole model, so memory that two modules share shows as well.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
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
_KINDS = (*MODULE_KINDS, "buffers")
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
        # Another module that holds the same Parameter adds to its gradient.
        owners = Counter(id(p) for m in modules for p in m._parameters.values())
        for name in list(calls):
            try:
                if case.budget.left() < 0:
                    raise TimeoutError("no time was left; raise verify.seconds")
                items = _compare(case, name, calls.pop(name), run, owners)
            except (MemoryError, torch.OutOfMemoryError):
                raise
            except Exception as error:  # the module's code may depend on the code around it
                left_out[name] = first_line(error)
                continue
            for item in items:
                # What a module leaves in its buffers counts as an output.
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
    if any(call.is_twice for call in calls):
        raise RuntimeError("the forward differentiates")
    module, head = case.reference.get_submodule(name), f"{name}." if name else ""
    own = [key for key, p in module.named_parameters() if owners[id(p)] == 1]
    shared = {key for key, _ in module.named_parameters()} - {*own}
    gradients = run.tensors.get("parameter gradients", {})
    given = {kind: Named() for kind in _KINDS}
    for index, call in enumerate(calls):
        for kind, named in zip(_KINDS, (call.outputs, call.input_gradients), strict=False):
            given[kind] |= {f"{index}.{place}": tensor for place, tensor in named.items()}
    given["module gradients"] |= {k: gradients[head + k] for k in own if head + k in gradients}
    given["buffers"] = {k: run.tensors["buffers"][head + k] for k, _ in module.named_buffers()}

    def deviations(exact: dict[str, Named], *noisy: dict[str, Named]) -> list[Deviation]:
        found, depth = [], _DEPTH if case.dtype == torch.float32 else 1
        for kind, named in exact.items():
            right = {n: t for n, t in named.items() if n not in shared}
            if all(map(is_finite, right.values())):
                actual = {n: t for n, t in given[kind].items() if n in right}
                others = [run[kind] for run in noisy]
                found += compare(kind, right, others, actual, dtype=case.dtype, depth=depth)
        return found

    def as_prepared(tensor: Tensor, key: str) -> Tensor:
        return runs.cast(tensor, *case.targets.get(head + key, (tensor.dtype,)))

    low = _run_alone(module, calls, as_prepared, backward=case.backward, amp=case.amp)
    near = deviations(low)
    # A wrong output may come from a module that is as wrong in the unprepared model.
    may_be_near = not any(item.kind in ("outputs", "buffers") for item in case.wrong)
    if may_be_near and near and all(item.error <= _NEAR * item.allowed for item in near):
        return near
    in_float64 = partial(runs.cast, dtype=torch.float64)
    exact = _run_alone(module, calls, lambda t, _: in_float64(t), backward=case.backward)
    return deviations(exact, low)


def _run_alone(
    module: Any,
    calls: list[runs.ModuleCall],
    convert: Callable[[Tensor, str], Tensor],
    *,
    backward: bool,
    amp: str = "none",
) -> dict[str, Named]:
    """Call a module on recorded arguments, all of them converted, and sum the gradients of the calls."""
    outputs, gradients, weights = Named(), Named(), Named()
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        weights[name] = convert(tensor.detach(), name).requires_grad_(tensor.requires_grad)
    trained = {n: tensor for n, tensor in weights.items() if tensor.requires_grad}
    leaves: list[Tensor] = []

    def leaf(tensor: Tensor) -> Tensor:
        made = convert(tensor.detach(), "")
        leaves.append(made.requires_grad_(backward and made.is_floating_point()))
        return made.clone()

    for index, call in enumerate(calls):
        leaves.clear()
        with torch.set_grad_enabled(backward), runs.SameNumbers() as numbers:
            given = call.arguments.map(leaf)
            with autocast(amp, device_of([module], leaves)):
                result = functional_call(module, weights, given.args, given.kwargs)
        if numbers.draws:
            raise RuntimeError("it draws random numbers")
        wanted = trained | {f"{index}.{place}": leaves[place] for place in call.input_gradients}
        heads, grads = list[Tensor](), list[Tensor]()
        for place, output in enumerate(tensors_in(result)):
            outputs[f"{index}.{place}"] = output.detach()
            if output.requires_grad and (grad := call.output_gradients.get(place)) is not None:
                heads.append(output)
                grads.append(grad.to(output.dtype).contiguous())
        if heads and wanted:
            found = torch.autograd.grad(heads, [*wanted.values()], grads, allow_unused=True)
            for name, gradient in zip(wanted, found, strict=True):
                if gradient is not None:
                    gradients[name] = gradients.get(name, 0) + gradient
    buffers = {name: weights[name] for name, _ in module.named_buffers()}
    return dict(zip(_KINDS, (outputs, gradients, buffers), strict=True))
