"""Run a model once on stand-ins for its tensors; return outputs, gradients and the buffers afterwards."""

from __future__ import annotations

import contextlib
import math
import random
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from prepare.core.forward.autocast import autocast, device_of
from prepare.core.forward.nested import named_tensors_in
from prepare.core.forward.stand_ins import copy_of, real_stand_in
from prepare.core.forward.unchanged import unchanged
from prepare.core.model.tensors import is_plain
from prepare.core.utils.process_state import held_interrupts, ignored_warnings, interruptible
from prepare.pipeline.transfer import check_cast
from prepare.stages.verify.execution.determinism import (
    DeterministicMode,
    Float64Default,
    make_deterministic,
)
from prepare.stages.verify.execution.hooks import UnsafeBackwardDetector, repair_convolutions
from prepare.stages.verify.execution.side_effects import changed, kept_outputs, versions_of

if TYPE_CHECKING:
    from prepare.core.forward.call import Call

NamedTensors = dict[str, Tensor | None]
# Compilers read the gradient of every input, also of those that are not leaves; a checkpoint wants gradients.
_QUIET = (
    r"The \.grad attribute of a Tensor that is not a leaf|None of the inputs have requires_grad"
)


@dataclass
class RunResult:
    """The tensors of one run by name; None for a gradient that did not arrive.

    `unsafe_module` is the first module whose backward might overwrite memory, by the known issue
    `unsafe_issue`; then no backward ran. `roots` names the outputs that have a gradient.
    `changed` names the input tensors that the forward changed in place, `kept` the outputs in memory that the
    model keeps and writes itself.
    """

    outputs: NamedTensors = field(default_factory=dict)
    inputs: NamedTensors = field(default_factory=dict)
    parameters: NamedTensors = field(default_factory=dict)
    buffers: NamedTensors = field(default_factory=dict)
    unsafe_module: str | None = None
    unsafe_issue: str = ""
    roots: tuple[str, ...] = ()
    changed: set[str] = field(default_factory=set)
    kept: set[str] = field(default_factory=set)


# The kinds of tensors that are compared, and the field of RunResult that holds each.
RESULT_FIELDS = {
    "outputs": "outputs",
    "input gradients": "inputs",
    "parameter gradients": "parameters",
    "buffers": "buffers",
}


def run_model(
    model: nn.Module,
    call: Call,
    stand_in: Callable[[Tensor], Tensor],
    *,
    flags: Mapping[str, bool],
    seed: int = 0,
    dtype: torch.dtype | None = None,
    backward: bool = True,
    compiled: bool = False,
    repair: bool = False,
    frozen_inputs: bool = False,
    context: AbstractContextManager | None = None,
    amp: str = "none",
    scale: float = 1.0,
) -> RunResult:
    """Run `model` forward, and backward from fixed random gradients of all its outputs.

    The model and all global state are restored afterwards. `flags` holds the training flag of each
    module; `dtype` is the default dtype of tensors that the model creates; `context` is entered around
    forward and backward. With `compiled` the model runs as it will be used: in no_grad mode if there is no
    backward, with its own random numbers and dropout. With `repair`, convolutions whose backward may
    overwrite memory are repaired; another such backward is not run, see `UnsafeBackwardDetector`. With
    `frozen_inputs` the inputs need no gradient, as in most training. The forward runs under autocast to
    `amp`, or without autocast. The gradients of float16 outputs are multiplied by `scale`, as a GradScaler
    does, and all results divided by it.
    """
    result, detector = RunResult(), UnsafeBackwardDetector(model, compiled=compiled)
    with held_interrupts(), unchanged(model, call.args, call.kwargs, stand_in=stand_in):
        make_deterministic(model, flags)
        if repair:
            repair_convolutions(model)
        seed_everything(seed)
        has_graph = backward or not compiled
        is_leaf = has_graph and not frozen_inputs
        leaves, inputs = _leaves(call) if is_leaf else ({}, call.map(copy_of))
        given, versions = list(inputs.tensors()), versions_of(model)
        with (
            torch.inference_mode(mode=False),
            torch.set_grad_enabled(has_graph),
            context or contextlib.nullcontext(),
            Float64Default() if dtype == torch.float64 else contextlib.nullcontext(),
            # Also around backward, which runs checkpointed segments of the forward again.
            ignored_warnings(_QUIET),
            contextlib.nullcontext() if compiled else DeterministicMode(),
        ):
            with detector, autocast(amp, device_of([model], call.tensors())):
                output = interruptible(model, *inputs.args, **inputs.kwargs)
            tensors = dict(named_tensors_in(output))
            result.changed = changed(call.tensors(), given)
            result.kept = kept_outputs(model, versions, tensors)
            result.unsafe_module, result.unsafe_issue = detector.unsafe_module, detector.issue
            result.roots = tuple(name for name, each in tensors.items() if each.requires_grad)
            if backward and result.unsafe_module is None:
                _backward(tensors, seed, scale)
        result.outputs = {name: tensor.detach() for name, tensor in tensors.items()}
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if scale != 1.0:
            _unscale((*leaves.values(), *trained.values()), scale)
        result.inputs = {name: leaf.grad for name, leaf in leaves.items()}
        result.parameters = {name: p.grad for name, p in trained.items()}
        buffers = ((n, b) for n, b in model.named_buffers() if not b.is_nested)  # has no shape
        result.buffers = {name: buffer.detach() for name, buffer in buffers}
    return result


def same_stand_in(tensor: Tensor) -> Tensor:
    """Return a stand-in with the same values and strides, and the gradient hooks of a Parameter."""
    return _with_hooks(tensor, real_stand_in(tensor))


def compiled_stand_in(tensor: Tensor) -> Tensor:
    """Return a Parameter itself, since a compiler may have inlined its values; copy a buffer."""
    return tensor if isinstance(tensor, nn.Parameter) else copy_of(tensor)


def contiguous(tensor: Tensor) -> Tensor:
    """Copy a tensor to the contiguous format."""
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def cast(tensor: Tensor, dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
    """Return a contiguous stand-in in another real (or the matching complex) dtype; integers are kept.

    It is on `device`, by default that of the tensor. Numbers beyond the range of `dtype` become its largest,
    so that the noise of rounding stays finite.
    """
    if not is_plain(tensor):
        return tensor
    with torch.no_grad():
        if tensor.is_complex():
            dtype = torch.promote_types(dtype, torch.complex32)
        elif not tensor.is_floating_point():
            dtype = tensor.dtype
        values = torch.empty(tensor.shape, dtype=dtype, device=device or tensor.device)
        values.copy_(tensor.resolve_neg())
        if not tensor.is_complex():
            check_cast("", tensor, values, clamp=True)
    if not isinstance(tensor, nn.Parameter):
        return values.requires_grad_(tensor.requires_grad)
    return _with_hooks(tensor, nn.Parameter(values, tensor.requires_grad))


def _leaves(call: Call) -> tuple[dict[str, Tensor], Call]:
    leaves: dict[str, Tensor] = {}

    def leaf(tensor: Tensor) -> Tensor:
        copy = copy_of(tensor)
        if not (copy.is_floating_point() or copy.is_complex()):
            return copy
        leaves[f"input {len(leaves)}"] = copy.requires_grad_()
        # A leaf cannot be changed in place, as a model's first ReLU may do; a copy of it can.
        return copy.clone()

    with torch.enable_grad():
        return leaves, call.map(leaf)


def _backward(outputs: Mapping[str, Tensor], seed: int, scale: float) -> None:
    roots = [tensor for tensor in outputs.values() if tensor.requires_grad]
    if scale != 1.0:
        # The gradient is cast, as a loss in float32 does; a scaled gradient may not fit into float16.
        roots = [root.float() if root.dtype == torch.float16 else root for root in roots]
    if roots:
        gradients = [random_gradient(root, seed + i) * scale for i, root in enumerate(roots)]
        interruptible(torch.autograd.backward, roots, gradients)


def _unscale(tensors: Iterable[Tensor], scale: float) -> None:
    # A scale is a power of two, so dividing rounds nothing that float32 holds.
    for gradient in {id(t.grad): t.grad for t in tensors if t.grad is not None}.values():
        gradient.div_(scale)


def random_gradient(output: Tensor, seed: int) -> Tensor:
    """Draw numbers that every dtype represents exactly, in the output's layout and of a mean loss's size.

    A plain sum as the loss is useless for a model that ends in a norm or softmax: its gradient is zero.
    """
    indices = torch.randint(0, 4, output.shape, generator=torch.Generator().manual_seed(seed))
    signed = torch.tensor([-1.0, -0.5, 0.5, 1.0])[indices]
    exponent = round(math.log2(max(output.numel(), 1)) / 2)
    return torch.empty_like(output).copy_(signed * 2.0**-exponent)


def _with_hooks(tensor: Tensor, stand_in: Tensor) -> Tensor:
    """Copy the gradient hooks of a Parameter to its stand-in.

    Hooks after accumulation are not copied: an optimizer may step in them.
    """
    hooks = getattr(tensor, "_backward_hooks", None) if stand_in is not tensor else None
    for hook in (hooks or {}).values():
        stand_in.register_hook(hook)
    return stand_in


def seed_everything(seed: int) -> None:
    """Seed torch, Python and NumPy."""
    if torch.cuda.is_initialized():
        torch.manual_seed(seed)
    else:  # torch.manual_seed takes 1,000 times as long: it formats a stack for each kind of device
        torch.default_generator.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
