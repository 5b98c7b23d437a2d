"""Compare every leaf module alone, on the inputs and gradients that it had in one run of the prepared model.

A whole model amplifies rounding: a ReLU whose input changes its sign changes single gradients of all layers
before it. Alone, a module and its reference get exactly the same numbers, so both take the same
side of each kink, and an error in one module stands out at any depth. What the prepared module computed is
what it computed inside of the whole model, so memory that two modules share shows as well.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
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
from prepare.stages.verify.deviations import Deviation, compare, is_finite
from prepare.stages.verify.runs import (
    ModuleCall,
    Named,
    Run,
    SameNumbers,
    cast,
    make_deterministic,
    repaired,
)

if TYPE_CHECKING:
    from prepare.stages.verify.case import VerificationCase

MODULE_KINDS = ("module outputs", "module gradients")
# A kernel in float32 may add up many numbers in another order: the floor of its tolerance allows for so many
# layers, 0.008 %, which is far below the errors that are searched for.
_DEPTH = {torch.float16: 1, torch.bfloat16: 1}
_DEPTH_DEFAULT = 100
# Within so much of the allowance, what the unprepared module computes in the same dtypes decides: the error
# against float64 is then at most its own error and this, which is always allowed.
_NEAR = 0.5


def compare_alone(
    case: VerificationCase, run: Run, names: Collection[str]
) -> tuple[dict[str, list[Deviation]], dict[str, str]]:
    """Compare the recorded calls of the leaves of these names.

    Return the deviations by kind, with the module as name, and why some modules were left out.
    """
    found, left_out = {kind: list[Deviation]() for kind in MODULE_KINDS}, dict[str, str]()
    calls: dict[str, list[ModuleCall]] = {}
    for call in run.calls:
        calls.setdefault(call.name, []).append(call)
    in_float64 = unchanged(case.reference, stand_in=partial(cast, dtype=torch.float64))
    quiet = ignored_warnings("the tensors in a .* stay as they are")
    casts = same_casts(case.reference, case.prepared)
    with quiet, in_float64, casts, repaired(case.reference, case.dtype):
        make_deterministic(case.reference, case.flags)
        modules = case.reference.modules()
        owners = Counter(id(p) for m in modules for p in m._parameters.values())
        for name in filter(names.__contains__, calls):
            try:
                if case.budget.left() < 0:
                    raise TimeoutError("no time was left; raise verify.seconds")
                for item in _compare(case, name, calls[name], run, owners):
                    found[item.kind].append(replace(item, name=name))
            except Exception as error:  # the module's code may depend on the code around it
                if isinstance(error, MemoryError | torch.OutOfMemoryError):
                    raise
                left_out[name] = first_line(error)
    return found, left_out


def _compare(
    case: VerificationCase,
    name: str,
    calls: Sequence[ModuleCall],
    run: Run,
    owners: Mapping[int, int],
) -> list[Deviation]:
    module, head = case.reference.get_submodule(name), f"{name}." if name else ""

    def lone(dtype: torch.dtype | None, amp: str = "none") -> dict[str, Named]:
        """Run it in one dtype or, without one, in those of the prepared model."""
        weights = {}
        for key, tensor in (*module.named_parameters(), *module.named_buffers()):
            target = (dtype,) if dtype else case.targets.get(head + key, (tensor.dtype,))
            weights[key] = cast(tensor.detach(), *target).requires_grad_(tensor.requires_grad)
        with torch.set_grad_enabled(case.backward), SameNumbers(wide=dtype == torch.float64):
            return _run_alone(module, calls, weights, dtype, amp)

    # Another module that holds the same Parameter adds to its gradient.
    parameters = dict(module.named_parameters())
    own = {head + n: n for n, p in parameters.items() if owners[id(p)] == 1}
    buffers = {head + n: n for n, _ in module.named_buffers()}
    gradients = run.tensors.get("parameter gradients", {})
    actual = {
        "module outputs": Named(),
        "module gradients": {own[n]: t for n, t in gradients.items() if n in own},
        "buffers": {buffers[n]: t for n, t in run.tensors["buffers"].items() if n in buffers},
    }
    for index, call in enumerate(calls):
        for kind, tensors in zip(MODULE_KINDS, (call.outputs, call.input_gradients), strict=True):
            actual[kind] |= {f"{index}.{place}": tensor for place, tensor in tensors.items()}

    def deviations(exact: dict[str, Named], noisy: dict[str, Named]) -> list[Deviation]:
        found = []
        for kind, named in exact.items():
            shared = {*parameters} - {*own.values()}
            right = {n: t for n, t in named.items() if n not in shared}
            if not all(map(is_finite, right.values())):
                continue
            given = {n: t for n, t in actual[kind].items() if n in right}
            floats = [t for t in given.values() if kind == "buffers" and t.is_floating_point()]
            # The statistics of a norm that stays in float32 have the digits of float32.
            dtypes = {tensor.dtype for tensor in floats}
            dtype = max(dtypes, key=lambda each: torch.finfo(each).eps, default=case.dtype)
            depth = _DEPTH.get(dtype, _DEPTH_DEFAULT)
            items = compare(kind, right, [noisy.get(kind, {})], given, dtype=dtype, depth=depth)
            own_kind = kind if kind in MODULE_KINDS else MODULE_KINDS[0]
            found += [replace(item, kind=own_kind) for item in items]
        return found

    # A wrong output may come from a module that is as wrong in the unprepared model.
    may_be_near = not any(item.kind in ("outputs", "buffers") for item in case.wrong)
    low = None
    with contextlib.suppress(RuntimeError):  # torch may lack a kernel in 16 bits
        low = lone(None, case.amp)
        near = deviations(low, {})
        if may_be_near and near and all(item.error <= _NEAR * item.allowed for item in near):
            return near
    exact = lone(torch.float64)
    if low is None:
        rough = lone(torch.float32)
        low = {k: {n: t.to(case.dtype) for n, t in rough[k].items()} for k in rough}
    return deviations(exact, low)


def _run_alone(
    module: nn.Module,
    calls: Sequence[ModuleCall],
    weights: Named,
    dtype: torch.dtype | None,
    amp: str,
) -> dict[str, Named]:
    """Call a module on recorded arguments, in their dtypes or in one, and sum the gradients of the calls."""
    outputs, gradients, backward = Named(), Named(), torch.is_grad_enabled()

    def convert(leaves: list[Tensor], tensor: Tensor) -> Tensor:
        made = cast(tensor.detach(), dtype or tensor.dtype)
        leaves.append(made.requires_grad_(backward and made.is_floating_point()))
        return made.clone()

    for index, call in enumerate(calls):
        leaves: list[Tensor] = []
        given = call.arguments.map(partial(convert, leaves))
        with autocast(amp, device_of([module], given.tensors())):
            result = functional_call(module, weights, given.args, given.kwargs)
        places = {
            f"{index}.{place}": leaf
            for place, leaf in enumerate(leaves)
            if place in call.input_gradients or (call.needs and call.needs[place])
        }
        wanted = places | {name: tensor for name, tensor in weights.items() if tensor.requires_grad}
        roots: list[Any] = []
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
