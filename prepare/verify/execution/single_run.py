"""One run of a model on stand-ins for its tensors: outputs, gradients, and buffers afterwards."""

from __future__ import annotations

import contextlib
import math
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from prepare.core.forward.nested import named_tensors_in
from prepare.core.forward.stand_ins import copy_of, real_stand_in, standing_in
from prepare.core.forward.torch_state import isolated
from prepare.core.model.tensors import is_plain
from prepare.verify.execution.determinism import Still, hold_still
from prepare.verify.execution.memory_safety import Bounds, repair

if TYPE_CHECKING:
    from prepare.core.forward.call import Call

Named = dict[str, Tensor | None]


@dataclass
class Run:
    """What one run gave, each tensor by its name; a None is a gradient that did not arrive.

    `beyond` is the first module for which a backward would have gone beyond its memory: there was none.
    """

    outputs: Named = field(default_factory=dict)
    inputs: Named = field(default_factory=dict)
    parameters: Named = field(default_factory=dict)
    buffers: Named = field(default_factory=dict)
    beyond: str | None = None


def run(
    model: nn.Module,
    call: Call,
    stand_in: Callable[[Tensor], Tensor],
    *,
    flags: Mapping[str, bool],
    seed: int = 0,
    dtype: torch.dtype | None = None,
    backward: bool = True,
    compiled: bool = False,
    repaired: bool = False,
    careful: bool = False,
    watching: Any = None,
) -> Run:
    """Runs `model` forward, and backward from fixed random gradients of all its outputs.

    The model and everything global is afterwards as before. `flags` holds the training mode of
    each module; `dtype` is the default one for tensors that the model makes itself; `watching` is
    a context for the time of both. With `compiled` the model runs as it will be used: without gradients
    where there is no backward, and with what it draws and drops itself. `repaired` and `careful` are
    for convolutions whose backward may go beyond its memory, see
    `prepare.verify.execution.memory_safety`: they run repaired; or there is no backward.
    """
    found, bounds = Run(), Bounds(model)
    with isolated(), _numpy_numbers(), standing_in(model, stand_in):
        hold_still(model, flags)
        if repaired:
            repair(model)
        if dtype is not None:
            torch.set_default_dtype(dtype)
        _seed(seed)
        graph = backward or not compiled
        leaves, given = _leaves(call) if graph else ({}, call.map(copy_of))
        with (
            torch.inference_mode(mode=False),
            torch.set_grad_enabled(graph),
            watching or _nothing(),
            # Of the backward too: in it checkpointed parts of a forward are computed once more.
            _as_used() if compiled else Still(),
        ):
            with bounds if careful else _nothing():
                output = model(*given.args, **given.kwargs)
            tensors = dict(named_tensors_in(output))
            found.beyond = bounds.beyond
            if backward and found.beyond is None:
                _backward(tensors, seed)
        found.outputs = {name: tensor.detach() for name, tensor in tensors.items()}
        found.inputs = {name: leaf.grad for name, leaf in leaves.items()}
        parameters = model.named_parameters()
        found.parameters = {name: p.grad for name, p in parameters if p.requires_grad}
        found.buffers = {name: buffer.detach() for name, buffer in model.named_buffers()}
    return found


def itself(tensor: Tensor) -> Tensor:
    """A stand-in as the tensor is: the same values and strides, and a Parameter's own hooks."""
    return _with_hooks(tensor, real_stand_in(tensor))


def its_own(tensor: Tensor) -> Tensor:
    """A Parameter itself, since a compiler may have built its values in; of a buffer a copy."""
    return tensor if isinstance(tensor, nn.Parameter) else copy_of(tensor)


def contiguous(call: Call) -> Call:
    """The call with every tensor copied into the contiguous format."""
    return call.map(lambda tensor: tensor.detach().clone(memory_format=torch.contiguous_format))


def cast(tensor: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A contiguous stand-in in another real (or the matching complex) dtype; integers stay."""
    if not is_plain(tensor):
        return tensor
    with torch.no_grad():
        if tensor.is_complex():
            dtype = torch.promote_types(dtype, torch.complex32)
        elif not tensor.is_floating_point():
            dtype = tensor.dtype
        made = torch.empty(tensor.shape, dtype=dtype, device=device).copy_(tensor)
    if not isinstance(tensor, nn.Parameter):
        return made.requires_grad_(tensor.requires_grad)
    return _with_hooks(tensor, nn.Parameter(made, tensor.requires_grad))


def _leaves(call: Call) -> tuple[dict[str, Tensor], Call]:
    leaves: dict[str, Tensor] = {}

    def leaf(tensor: Tensor) -> Tensor:
        copy = copy_of(tensor)
        if not (copy.is_floating_point() or copy.is_complex()):
            return copy
        leaves[f"input {len(leaves)}"] = copy.requires_grad_()
        # A leaf must not be changed in place, as a model's first ReLU may do; its copy may.
        return copy.clone()

    with torch.enable_grad():
        return leaves, call.map(leaf)


def _backward(outputs: Mapping[str, Tensor], seed: int) -> None:
    roots = [tensor for tensor in outputs.values() if tensor.requires_grad]
    if roots:
        torch.autograd.backward(roots, [_gradient(t, seed + i) for i, t in enumerate(roots)])


def _gradient(output: Tensor, seed: int) -> Tensor:
    """Numbers that every dtype holds exactly, laid out as the output; of a mean loss's size.

    A plain sum would do for none that ends in a norm or a softmax: its gradient there is zero.
    """
    drawn = torch.randint(0, 4, output.shape, generator=torch.Generator().manual_seed(seed))
    signed = torch.tensor([-1.0, -0.5, 0.5, 1.0])[drawn]
    exponent = round(math.log2(max(output.numel(), 1)) / 2)
    return torch.empty_like(output).copy_(signed * 2.0**-exponent)


def _with_hooks(tensor: Tensor, made: Tensor) -> Tensor:
    """Gradient hooks of a Parameter run for its stand-in too; those after accumulation do not:
    an optimizer may step in them.
    """
    hooks = getattr(tensor, "_backward_hooks", None) if made is not tensor else None
    for hook in (hooks or {}).values():
        made.register_hook(hook)
    return made


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)


@contextlib.contextmanager
def _numpy_numbers() -> Iterator[None]:
    numpy = sys.modules.get("numpy")
    state = numpy.random.get_state() if numpy else None
    try:
        yield
    finally:
        if numpy:
            numpy.random.set_state(state)


@contextlib.contextmanager
def _as_used() -> Iterator[None]:
    """A compiler asks every input for its gradient, and torch warns of those that are computed."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"The \.grad attribute of a Tensor that is not a leaf")
        yield


def _nothing() -> Any:
    return contextlib.nullcontext()
