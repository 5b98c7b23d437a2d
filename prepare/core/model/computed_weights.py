"""The weight that a forward would really use, where a module computes it: evaluated on a copy."""

from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from prepare.core.model.convolutions import CONVOLUTIONS
from prepare.core.model.module_tree import copy_tree
from prepare.core.model.repair_marker import is_repair
from prepare.core.model.tensors import computed_names, is_strided, weight_hooks


def computed_tensors(module: nn.Module) -> dict[str, Tensor | str]:
    """The tensors that `module` computes before or in its forward, by name; nothing in it is changed.

    Covers parametrizations, the legacy hooks of weight_norm and spectral_norm, pruning, and
    subclasses of a convolution whose own forward rebuilds the weight. A text stands for a tensor
    that could not be evaluated, and says why.
    """
    names = computed_names(module)
    rebuilt = isinstance(module, CONVOLUTIONS) and _has_own_forward(module)
    if not names and not rebuilt:
        return {}
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        try:
            clone = _evaluable(module)
            found: dict[str, Tensor | str] = {name: getattr(clone, name) for name in names}
            if rebuilt:
                used = _weight_in_forward(clone)
                if not _is_held(clone, used):
                    found["weight"] = used
        except Exception as error:  # the module's own code runs here, and may raise anything
            reason = f"cannot be evaluated: {type(error).__name__}: {error}"
            return dict.fromkeys(names or ("weight",), reason)
    return found


def _evaluable(module: nn.Module) -> nn.Module:
    """A copy with tensors of its own and no hook of the user's, after torch's weight hooks have run."""
    clone = copy_tree(module, lambda tensor: _like(tensor, tensor.detach().clone()))
    for part in clone.modules():
        part.training = False
    for hook, _ in weight_hooks(clone):
        hook(clone, None)
    for part in clone.modules():
        for table in (part._forward_pre_hooks, part._forward_hooks):
            table.clear()
    return clone


def _like(tensor: Tensor, copy: Tensor) -> Tensor:
    return nn.Parameter(copy, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copy


def _has_own_forward(module: nn.Module) -> bool:
    """Whether its forward is neither torch's nor a repair's: those take the weight as it is."""
    return not all(_is_known(module, name) for name in ("forward", "_conv_forward"))


def _is_known(module: nn.Module, name: str) -> bool:
    function = getattr(getattr(module, name), "__func__", None)
    if function is None:
        return False
    repairs = (cls for cls in type(module).__mro__ if is_repair(cls))
    return function.__module__.startswith("torch.nn.modules.") or any(
        vars(cls).get(name) is function for cls in repairs
    )


def _weight_in_forward(module: nn.Module) -> Tensor:
    """The weight of the first convolution in a forward over the smallest input that fits."""
    weight = next(chain(module.parameters(), module.buffers()))
    padding = (
        module.padding if isinstance(module.padding, tuple) else (0,) * len(module.kernel_size)
    )
    sizes = (
        dilation * (kernel - 1) + 1 + pad
        for kernel, dilation, pad in zip(module.kernel_size, module.dilation, padding, strict=True)
    )
    sample = torch.zeros(1, module.in_channels, *sizes, dtype=weight.dtype, device=weight.device)
    with _Convolutions() as seen:
        module.forward(sample)
    if not seen.weights:
        raise ValueError("no convolution ran in its forward")
    return seen.weights[0]


def _is_held(module: nn.Module, used: Tensor) -> bool:
    """Whether the weight used is a tensor the module holds, as it lies there."""
    held = chain(module.parameters(), module.buffers())
    return any(
        is_strided(tensor)
        and tensor.data_ptr() == used.data_ptr()
        and tensor.stride() == used.stride()
        for tensor in held
    )


class _Convolutions(TorchDispatchMode):
    """Notes the weight of every convolution that runs."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "convolution" in func.__name__:
            self.weights.append(args[1])
        return func(*args, **(kwargs or {}))
