"""Copy a module with all that a call of it may change, but with the same Parameters."""

from __future__ import annotations

import copy
from contextlib import suppress
from functools import partial
from operator import is_
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from prepare.core.forward import holders
from prepare.core.forward.stand_ins import copy_of
from prepare.core.model.module_tree import copy_tree
from prepare.core.model.replaced_method import ReplacedMethod

# Containers and objects below an attribute of a module; what is deeper belongs to something else.
_DEPTH = 7
_TABLES = frozenset(
    key for key, value in vars(nn.Module()).items() if isinstance(value, dict | set)
)


def copied(module: nn.Module) -> nn.Module:
    """Return the module as it is now: a call of the copy changes no tensor, container or object of it."""
    memo: dict[int, Any] = {}
    with torch.inference_mode(mode=False), torch.no_grad():
        tree = copy_tree(module, partial(_copied, memo=memo))
        parts = dict(module.named_modules(remove_duplicate=False))
        pairs = [(parts[n], part) for n, part in tree.named_modules(remove_duplicate=False)]
        memo |= {id(own): part for own, part in pairs}
        for own, part in pairs:
            for key, value in vars(own).items():
                if key not in _TABLES and not isinstance(value, ReplacedMethod):
                    vars(part)[key] = _copied(value, memo=memo)
    return tree


def _copied(value: Any, *, memo: dict[int, Any], depth: int = _DEPTH) -> Any:
    kind, is_known = type(value), id(value) in memo
    if kind in holders.SIMPLE or not depth or (isinstance(value, nn.Module) and not is_known):
        return value
    if is_known:
        return memo[id(value)]
    inner, twin = partial(_copied, memo=memo, depth=depth - 1), value
    if isinstance(value, Tensor):
        is_shared = isinstance(value, nn.Parameter) or value.requires_grad
        twin = value if is_shared else copy_of(value)
    elif kind is MethodType:
        twin = MethodType(inner(value.__func__), inner(value.__self__))
    elif kind is partial:
        twin = partial(inner(value.func), *map(inner, value.args), **value.keywords)
    elif kind is FunctionType and value.__closure__:
        cells = tuple(map(partial(_cell, inner), value.__closure__))
        code, names, defaults = value.__code__, value.__globals__, value.__defaults__
        twin = FunctionType(code, names, value.__name__, defaults, cells)
        twin.__kwdefaults__ = value.__kwdefaults__
    elif isinstance(value, tuple):
        items = list(map(inner, value))
        if not all(map(is_, items, value)):
            twin = kind._make(items) if hasattr(kind, "_make") else kind(items)
    else:
        with suppress(Exception):  # its class may refuse to be copied
            if holders.reset_of(value) is not None:
                twin = copy.deepcopy(value)
            elif (access := holders.access_of(value)) is not None:
                twin = memo[id(value)] = copy.copy(value)
                holders.Holder(twin, ("", ""), *access, *access[0](twin)).replace(inner)
    memo[id(value)] = twin
    return twin


def _cell(inner: Any, cell: CellType) -> CellType:
    try:
        return CellType(inner(cell.cell_contents))
    except ValueError:  # not assigned yet
        return CellType()
