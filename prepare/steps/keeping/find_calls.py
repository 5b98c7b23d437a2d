"""Find the calls in the methods of a module class that may lose a layout, by its source."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

# The functions that are replaced, and the methods of tensors, by the name of the operator that replaces them.
FUNCTIONS: dict[Any, str] = {
    torch.concat: "cat",
    torch.concatenate: "cat",
    **{getattr(F, name): name for name in ("pad", "interpolate", "avg_pool3d", "softmax")},
    **{
        getattr(torch, name): name
        for name in (
            *("cat", "stack", "where", "softmax", "clone", "empty_like", "zeros_like", "ones_like"),
            *("repeat_interleave", "reshape", "flatten", "sum"),
        )
    },
}
METHODS = (
    "clone", "contiguous", "flatten", "repeat", "repeat_interleave", "reshape", "softmax", "sum",
    "view",
)  # fmt: skip
_OPERATORS = {ast.Add: "add", ast.Mult: "mul"}
# These change nothing but strides. A `.contiguous()` may be there on purpose, `view` needs it, and reshapes,
# sums and `+` are everywhere, so these are replaced only if they are named.
SAFE = frozenset({*FUNCTIONS.values(), "clone", "repeat"}) - {"reshape", "flatten", "sum"}
_TORCH = str(Path(torch.__file__).parent)


@dataclass(frozen=True, slots=True)
class CodeCall:
    """One call in a method of a module class.

    `name` is `WanCausalConv3d.forward: F.pad(x, padding)`: the class, the method and the code. `operator`
    replaces it. `file` and `lines` are the file and its first and last line. `obstacle` says why it cannot
    be replaced in memory, if it cannot.
    """

    name: str
    operator: str
    owner: type
    method: str
    file: str
    lines: tuple[int, int]
    obstacle: str = ""


def find_calls(cls: type[nn.Module]) -> tuple[CodeCall, ...]:
    """Return the calls in the methods of a class and of its bases, those of torch left out."""
    found = []
    for owner in _owners(cls):
        for call in _calls_of(owner):
            if method_owner(cls, call.method) is not owner:
                why = f"{cls.__qualname__} overrides {call.method}, and may call it with super()"
                call = replace(call, obstacle=why)  # noqa: PLW2901
            found.append(call)
    return tuple(found)


def method_owner(cls: type, method: str) -> type | None:
    """Return the class that defines the method that an instance of `cls` runs."""
    return next((owner for owner in cls.__mro__ if method in vars(owner)), None)


def _owners(cls: type) -> Iterator[type]:
    for owner in cls.__mro__:
        if owner is nn.Module:
            return
        if not owner.__module__.startswith(("torch.", "builtins", "prepare.steps.")):
            yield owner


@lru_cache(maxsize=4096)
def _calls_of(owner: type) -> tuple[CodeCall, ...]:
    return tuple(
        call
        for method, function in vars(owner).items()
        if isinstance(function, FunctionType)
        for call in _calls_in(owner, method, function)
    )


def _calls_in(owner: type, method: str, defined: FunctionType) -> Iterator[CodeCall]:
    source = method_source(defined)
    if source is None:
        return
    function, definition = source
    obstacle = "" if function is defined else f"{owner.__qualname__}.{method} is decorated"
    file = function.__code__.co_filename
    for node in ast.walk(definition):
        if operator := operator_of(node, function):
            assert isinstance(node, ast.expr)
            lines = node.lineno, node.end_lineno or node.lineno
            name = f"{owner.__qualname__}.{method}: {ast.unparse(node)}"
            yield CodeCall(name, operator, owner, method, file, lines, obstacle)


@lru_cache(maxsize=4096)
def method_source(method: FunctionType) -> tuple[FunctionType, ast.FunctionDef] | None:
    """Return the function of a method and its syntax tree, with the line numbers of its file.

    None if it is a function of torch, or its source is not there or is another.
    """
    function = inspect.unwrap(method)
    if not isinstance(function, FunctionType) or function.__code__.co_filename.startswith(_TORCH):
        return None
    try:
        lines, first = inspect.getsourcelines(function)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, TypeError, SyntaxError):
        return None
    definition = tree.body[0] if len(tree.body) == 1 else None
    if not isinstance(definition, ast.FunctionDef) or definition.name != function.__name__:
        return None
    ast.increment_lineno(definition, max(first, 1) - 1)
    return function, definition


def operator_of(node: ast.AST, function: FunctionType) -> str | None:
    """Return the name of the operator that can replace a node of a function's tree, or None."""
    if isinstance(node, ast.BinOp):
        return _OPERATORS.get(type(node.op))
    if not isinstance(node, ast.Call):
        return None
    found = value_of(node.func, function)
    if getattr(found, "__module__", "") == "einops.einops":
        return "rearrange" if found.__name__ == "rearrange" else None
    if found is not None:
        return FUNCTIONS.get(found) if isinstance(found, Hashable) else None
    if isinstance(node.func, ast.Attribute) and node.func.attr in METHODS:
        return node.func.attr
    return None


def value_of(node: ast.AST, function: FunctionType) -> Any:
    """Return the value of a dotted name, if it begins with a global of the function; else None."""
    if isinstance(node, ast.Attribute):
        base = value_of(node.value, function)
        return None if base is None else getattr(base, node.attr, None)
    if isinstance(node, ast.Name) and not _is_local(node.id, function.__code__):
        return function.__globals__.get(node.id)
    return None


def _is_local(name: str, code: CodeType) -> bool:
    return name in (*code.co_varnames, *code.co_cellvars, *code.co_freevars)
