"""Put torch's own class back in one module, and call it in the contiguous format."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from prepare.core.forward.compiled import is_compiled
from prepare.core.forward.nested import map_tensors
from prepare.pipeline.optimizer_state import relayout

if TYPE_CHECKING:
    from torch.optim import Optimizer


# The phases whose steps change the code of a module.
_CODE = ("structure", "runtime")


@dataclasses.dataclass(frozen=True)
class ContiguousArguments:
    """A forward pre-hook that makes the arguments contiguous; as plain data it can be copied and pickled."""

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return map_tensors(_contiguous, args), map_tensors(_contiguous, kwargs)


def obstacle_to_put_back(module: nn.Module, *, training: bool, optimizer: Optimizer | None) -> str:
    """Say why a module cannot get torch's own class back; empty if it can."""
    if training and optimizer is None and any(not t.is_contiguous() for t in _own(module)):
        return "its weights would change their layout in training: give guard the optimizer="
    return ""


def put_back(module: nn.Module, pipeline: Any, optimizer: Optimizer | None) -> str:
    """Put torch's own class back in `module`, not in those inside it; return what was done."""
    if is_compiled(module):
        vars(module).pop("_compiled_call_impl")
        return "it runs uncompiled from now on"
    # A view of the module without its children, on which a step is undone that would reach into them.
    view = object.__new__(type(module))
    kept = {key: part for key, part in module._modules.items() if key == "parametrizations"}
    vars(view).update(vars(module) | {"_modules": kept})
    pipeline.undo(view, phases=_CODE)
    module.__class__ = type(view)
    for key in vars(module).keys() - vars(view).keys():  # a method that a step had put on it
        del vars(module)[key]
    with torch.no_grad():
        for tensor in _own(module):
            tensor.data = tensor.data.contiguous()
    if ContiguousArguments() not in module._forward_pre_hooks.values():
        module.register_forward_pre_hook(ContiguousArguments(), with_kwargs=True)
    if optimizer is not None:
        relayout(optimizer)
    return f"its own {type(module).__name__} runs there in the contiguous format from now on"


def _own(module: nn.Module) -> list[Tensor]:
    tensors = (*module._parameters.values(), *module._buffers.values())
    return [tensor for tensor in tensors if tensor is not None]


def _contiguous(tensor: Tensor) -> Tensor:
    return (
        tensor.contiguous() if tensor.layout is torch.strided and not tensor.is_nested else tensor
    )
