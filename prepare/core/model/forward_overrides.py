"""Run a module's own code on a copy: for the weights that it computes, and what it keeps out of a cast."""

from functools import cache
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from prepare.core.model.forward_code import forward_code
from prepare.core.model.module_kinds import CONVOLUTIONS
from prepare.core.model.module_tree import clone_of, copy_tree
from prepare.core.model.tensors import (
    computed_names,
    is_strided,
    name_of,
    named_modules,
    named_tensors,
    special_form,
    weight_hooks,
)
from prepare.core.utils.process_state import PROCESS_STATE, interruptible
from prepare.errors import RefusedError

_CASTS = {"float16": "half", "bfloat16": "bfloat16", "float32": "float", "float64": "double"}


def computed_tensors(module: nn.Module) -> dict[str, Tensor | str]:
    """Return the tensors that `module` computes before or in its forward, by name; change nothing.

    Covers parametrizations, the legacy hooks of weight_norm and spectral_norm, pruning, and
    subclasses of a convolution whose own forward rebuilds the weight. A tensor that could not be
    evaluated is replaced by the reason, a string.
    """
    names = computed_names(module)
    code, is_convolution = forward_code(module), isinstance(module, CONVOLUTIONS)
    # A hook that hands its arguments on is not called: it may move weights, or count calls.
    rebuilt = is_convolution and not code.alone and not (code.replaced_by and code.through)
    if not names and not rebuilt:
        return {}
    with PROCESS_STATE, torch.no_grad(), torch.random.fork_rng(devices=[]):
        try:
            clone = _evaluable(module)
            computed: dict[str, Tensor | str] = {name: getattr(clone, name) for name in names}
            if rebuilt:
                used = _weight_in_forward(clone)
                if not _is_held(clone, used):
                    computed["weight"] = used
        except Exception as error:  # the module's own code runs here, and may raise anything
            reason = f"cannot be evaluated: {type(error).__name__}: {error}"
            return dict.fromkeys(names or ("weight",), reason)
    return computed


def _evaluable(module: nn.Module) -> nn.Module:
    """Return a copy with its own tensors and without hooks, after torch's weight hooks have run."""
    clone = copy_tree(module, clone_of)
    for part in clone.modules():
        part.training = False
    for hook, _ in weight_hooks(clone):
        hook(clone, None)
    for part in clone.modules():
        for table in (part._forward_pre_hooks, part._forward_hooks):
            table.clear()
    return clone


def _weight_in_forward(module: Any) -> Tensor:
    """Return the weight of the first convolution in a forward over the smallest possible input."""
    weight = next(chain(module.parameters(), module.buffers()))
    padding = (
        module.padding if isinstance(module.padding, tuple) else (0,) * len(module.kernel_size)
    )
    sizes = (
        dilation * (kernel - 1) + 1 + pad
        for kernel, dilation, pad in zip(module.kernel_size, module.dilation, padding, strict=True)
    )
    sample = torch.zeros(1, module.in_channels, *sizes, dtype=weight.dtype, device=weight.device)
    with _ConvolutionWeights() as recorded:
        interruptible(module.forward, sample)  # the module's own code may hang
    if not recorded.weights:
        raise ValueError("no convolution ran in its forward")
    return recorded.weights[0]


def _is_held(module: nn.Module, used: Tensor) -> bool:
    """Return whether `used` is a parameter or buffer of the module, with the same strides."""
    held = chain(module.parameters(), module.buffers())
    return any(
        is_strided(tensor)
        and tensor.data_ptr() == used.data_ptr()
        and tensor.stride() == used.stride()
        for tensor in held
    )


class _ConvolutionWeights(TorchDispatchMode):
    """Record the weight of every convolution that runs."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "convolution" in func.__name__:
            self.weights.append(args[1])
        return func(*args, **(kwargs or {}))


class Protected:
    """The tensors of one model that a module's override of `_apply`, `to` or `half` keeps in their dtype.

    torch itself calls only `_apply` of submodules; an override of `to` or `half` in a submodule is
    meant in the same way.
    """

    def __init__(self, model: nn.Module) -> None:
        self._overriding = [
            (name, module, methods)
            for name, module in named_modules(model)
            if (methods := _overrides(type(module)))  # type: ignore[arg-type]  # classes are hashable
        ]
        self._kept: dict[str, dict[int, str]] = {}

    def __bool__(self) -> bool:
        return bool(self._overriding)

    def reason(self, tensor: Tensor, dtype: str) -> str | None:
        """Return the method that keeps `tensor` out of `dtype`, in words, or None."""
        if dtype not in self._kept:
            self._kept[dtype] = {}
            for name, module, methods in self._overriding:
                self._kept[dtype].update(_kept(name, module, methods, dtype))
        return self._kept[dtype].get(id(tensor))


def _kept(name: str, module: nn.Module, overridden: tuple[str, ...], dtype: str) -> dict[int, str]:
    """Return the tensors under `module` that are not in `dtype` after its own code has cast a copy."""
    kept: dict[int, str] = {}
    target, cast = getattr(torch, dtype), _CASTS.get(dtype, "to")
    for method, called in (("_apply", cast), (cast, cast), ("to", "to")):
        if method not in overridden:
            continue
        clone = copy_tree(module, _without_data)
        try:
            getattr(clone, called)(*((target,) if called == "to" else ()))
        except Exception as error:
            wrong = f"its own {method}() raises {type(error).__name__}: {error}"
            where = name or type(module).__name__
            raise RefusedError(where, wrong, "do as it says, or exclude it") from error
        for original, copy in zip(_tensors(module), _tensors(clone), strict=True):
            if original.is_floating_point() and copy.dtype is not target:
                owner = f"{type(module).__name__}.{method}"
                kept[id(original)] = f"{owner} keeps it in {name_of(copy.dtype)}"
    return kept


def _tensors(module: nn.Module) -> list[Tensor]:
    return [place.tensor for place in named_tensors(module)]


def _without_data(tensor: Tensor) -> Tensor:
    if special_form(tensor):  # meta has no such form, and here only the dtype counts
        dtype = torch.uint8 if tensor.is_quantized else tensor.dtype
        copy = torch.empty(0, dtype=dtype, device="meta")
    else:
        copy = torch.empty_like(tensor, device="meta")
    return nn.Parameter(copy, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copy


@cache
def _overrides(cls: type[nn.Module]) -> tuple[str, ...]:
    """Return the casting methods of `cls` that are not defined in torch."""
    methods = ("_apply", "to", "half", "bfloat16", "float")
    defined = {name: getattr(getattr(cls, name), "__module__", "torch") for name in methods}
    return tuple(name for name, module in defined.items() if not module.startswith("torch."))
