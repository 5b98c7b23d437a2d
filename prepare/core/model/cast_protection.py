"""Find the tensors that a module's own code keeps out of a cast, by running that code on a copy."""

from functools import cache

import torch
from torch import Tensor, nn

from prepare.core.model.module_tree import copy_tree
from prepare.core.model.tensors import name_of, named_modules, special_form
from prepare.errors import RefusedError

_CASTS = {"float16": "half", "bfloat16": "bfloat16", "float32": "float", "float64": "double"}


class Protected:
    """The tensors of one model that a module's override of `_apply`, `to` or `half` keeps in their dtype.

    torch itself calls only `_apply` of submodules; an override of `to` or `half` in a submodule is
    meant in the same way.
    """

    def __init__(self, model: nn.Module) -> None:
        self._overriding = [
            (name, module) for name, module in named_modules(model) if _overrides(type(module))
        ]
        self._kept: dict[str, dict[int, str]] = {}

    def __bool__(self) -> bool:
        return bool(self._overriding)

    def reason(self, tensor: Tensor, dtype: str) -> str | None:
        """Return the method that keeps `tensor` out of `dtype`, in words, or None."""
        if dtype not in self._kept:
            self._kept[dtype] = {}
            for name, module in self._overriding:
                self._kept[dtype].update(_kept(name, module, dtype))
        return self._kept[dtype].get(id(tensor))


def _kept(name: str, module: nn.Module, dtype: str) -> dict[int, str]:
    """Return the tensors under `module` that are not in `dtype` after its own code has cast a copy."""
    kept: dict[int, str] = {}
    target, cast = getattr(torch, dtype), _CASTS.get(dtype, "to")
    overridden = _overrides(type(module))
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
    return [
        tensor
        for _, each in named_modules(module)
        for table in (each._parameters, each._buffers)
        for tensor in table.values()
        if tensor is not None
    ]


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
