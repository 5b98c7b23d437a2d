"""Which tensors a module's own code protects from a cast, found by asking that code on a copy."""

from functools import cache

import torch
from torch import Tensor, nn

from prepare.core.model.module_tree import copy_tree
from prepare.core.model.tensors import name_of, named_modules
from prepare.errors import RefusedError

_CASTS = {"float16": "half", "bfloat16": "bfloat16", "float32": "float", "float64": "double"}


class Protected:
    """Answers, for tensors of one model, whether a module's override of `_apply`, `to` or `half` keeps it.

    torch itself calls only `_apply` of the modules inside; an author who overrides `to` or `half`
    of one means the same by it.
    """

    def __init__(self, model: nn.Module) -> None:
        self._overriding = [
            (name, module) for name, module in named_modules(model) if _overrides(type(module))
        ]
        self._kept: dict[str, dict[int, str]] = {}

    def __bool__(self) -> bool:
        return bool(self._overriding)

    def reason(self, tensor: Tensor, dtype: str) -> str | None:
        """Whose code keeps `tensor` out of `dtype`, or None."""
        if dtype not in self._kept:
            self._kept[dtype] = {}
            for name, module in self._overriding:
                self._kept[dtype].update(_kept(name, module, dtype))
        return self._kept[dtype].get(id(tensor))


def _kept(name: str, module: nn.Module, dtype: str) -> dict[int, str]:
    """The tensors under `module` that are not in `dtype` after its own code has cast a copy."""
    kept: dict[int, str] = {}
    wanted, cast = getattr(torch, dtype), _CASTS.get(dtype, "to")
    overridden = _overrides(type(module))
    for asked, through in (("_apply", cast), (cast, cast), ("to", "to")):
        if asked not in overridden:
            continue
        clone = copy_tree(module, _without_data)
        try:
            getattr(clone, through)(*((wanted,) if through == "to" else ()))
        except Exception as error:
            wrong = f"its own {asked}() raises {type(error).__name__}: {error}"
            where = name or type(module).__name__
            raise RefusedError(where, wrong, "do as it says, or exclude it") from error
        for original, copy in zip(_tensors(module), _tensors(clone), strict=True):
            if original.is_floating_point() and copy.dtype is not wanted:
                whose = f"{type(module).__name__}.{asked}"
                kept[id(original)] = f"{whose} keeps it in {name_of(copy.dtype)}"
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
    copy = torch.empty_like(tensor, device="meta")
    return nn.Parameter(copy, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copy


@cache
def _overrides(cls: type[nn.Module]) -> tuple[str, ...]:
    """The casting methods that `cls` has from elsewhere than torch."""
    found = []
    for method in ("_apply", "to", "half", "bfloat16", "float"):
        module = getattr(getattr(cls, method), "__module__", "torch")
        if not module.startswith("torch."):
            found.append(method)
    return tuple(found)
