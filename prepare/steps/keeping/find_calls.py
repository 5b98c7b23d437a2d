"""Find the calls in the methods of a module class that may lose a layout, by its source."""

from __future__ import annotations

import ast
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from inspect import Signature, signature
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from prepare.core.model.replaced_method import foreign_method
from prepare.steps.keeping import operators
from prepare.steps.keeping.method_source import MethodSource, codes, method_source

# The functions that are replaced, and the methods of tensors, by the name of the operator that replaces them.
FUNCTIONS: dict[Any, str] = {
    torch.concat: "cat",
    torch.concatenate: "cat",
    **{getattr(F, name): name for name in ("pad", "interpolate", "avg_pool3d", "softmax")},
    **{
        getattr(torch, name): name
        for name in (
            *("cat", "stack", "where", "softmax", "clone", "empty_like", "zeros_like", "ones_like"),
            *("repeat_interleave", "flatten", "sum"),
        )
    },
    torch.reshape: "torch_reshape",
}
METHODS = (
    "clone", "contiguous", "flatten", "repeat", "repeat_interleave", "reshape", "softmax", "sum",
    "view",
)  # fmt: skip
_OPERATORS = {ast.Add: "add", ast.Mult: "mul"}
# These change nothing but strides. A `.contiguous()` may be there on purpose, `view` needs it, and reshapes,
# sums and `+` are everywhere, so these are replaced only if they are named.
SAFE = frozenset({*FUNCTIONS.values(), "clone", "repeat"}) - {"torch_reshape", "flatten", "sum"}
_CHANGED = "{} has been changed since {} was loaded: start the process again"


@dataclass(frozen=True, slots=True)
class CodeCall:
    """One call in a method of a module class.

    `name` is `WanCausalConv3d.forward: F.pad(x, padding)`: the class, the method and the code. `operator`
    replaces it. `file` and `lines` are the file and its first and last line. `obstacle` says why it cannot
    be replaced in memory, if it cannot. Without an operator it stands for a method whose source is another.
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
    found: list[CodeCall] = []
    for owner in _owners(cls):
        for method, function in vars(owner).items():
            if isinstance(function, FunctionType):
                calls = _calls_in(owner, method, function, function.__code__)
                if calls and method_owner(cls, method) is not owner:
                    why = f"{cls.__qualname__} overrides {method}, and may call it with super()"
                    calls = tuple(replace(call, obstacle=why) for call in calls)
                found += calls
    return tuple(found)


def calls_of(module: nn.Module) -> Iterator[CodeCall]:
    """Yield the calls that can be replaced in a module: those of the methods that run in it."""
    for call in find_calls(type(module)):
        if not call.obstacle and foreign_method(module, call.method) is None:
            yield call


def method_owner(cls: type, method: str) -> type | None:
    """Return the class that defines the method that an instance of `cls` runs."""
    return next((owner for owner in cls.__mro__ if method in vars(owner)), None)


def _owners(cls: type) -> Iterator[type]:
    for owner in cls.__mro__:
        if owner is nn.Module:
            return
        if not owner.__module__.startswith(("torch.", "builtins", "prepare.steps.")):
            yield owner


@lru_cache(maxsize=8192)
def _calls_in(owner: type, method: str, defined: FunctionType, _: CodeType) -> tuple[CodeCall, ...]:
    source = method_source(owner, method)
    if source is None:
        return ()
    function, where = source.function, f"{owner.__qualname__}.{method}"
    code = function.__code__
    if source.tree is None:
        names = {name for each in codes(code) for name in each.co_names}
        if names.isdisjoint({*METHODS, *SAFE}):
            return ()
        lines = [line for *_, line in code.co_lines() if line]
        span = min(lines), max(lines)
        why = _CHANGED.format(code.co_filename, where)
        return (CodeCall(f"{where}: ", "", owner, method, code.co_filename, span, why),)
    obstacle = "" if function is defined else f"{where} is decorated"
    if method[:2] == method[-2:] == "__":
        obstacle = f"Python looks for {method} in the class alone"
    return tuple(
        CodeCall(
            f"{where}: {ast.unparse(node)}",
            operator,
            owner,
            method,
            code.co_filename,
            (node.lineno, node.end_lineno or node.lineno),
            obstacle,
        )
        for node in ast.walk(source.tree)
        if isinstance(node, ast.expr) and (operator := operator_of(node, source))
    )


def operator_of(node: ast.AST, source: MethodSource) -> str | None:
    """Return the name of the operator that can replace a node of a function's tree, or None."""
    if isinstance(node, ast.BinOp):
        return _OPERATORS.get(type(node.op))
    if not isinstance(node, ast.Call):
        return None
    operator, found = None, value_of(node.func, source)
    if getattr(found, "__module__", "") == "einops.einops":
        operator = "rearrange" if found.__name__ == "rearrange" else None
    elif found is not None:
        operator = FUNCTIONS.get(found) if isinstance(found, Hashable) else None
    elif isinstance(node.func, ast.Attribute) and node.func.attr in METHODS:
        operator = node.func.attr
    return operator if operator and _is_served(operator, node, is_method=found is None) else None


def _is_served(operator: str, node: ast.Call, *, is_method: bool) -> bool:
    """Return whether the operator has the arguments of a call, as it is written."""
    if any(keyword.arg is None for keyword in node.keywords):
        return False
    given = [node.func, *node.args] if is_method else node.args
    parameters = _signature(operator).parameters.values()
    takes_any = any(each.kind is each.VAR_POSITIONAL for each in parameters)
    if not takes_any and any(isinstance(argument, ast.Starred) for argument in given):
        return False
    try:
        _signature(operator).bind(*given, **{str(each.arg): each for each in node.keywords})
    except TypeError:
        return False
    return True


@lru_cache
def _signature(operator: str) -> Signature:
    return signature(getattr(operators, operator))


def value_of(node: ast.AST, source: MethodSource) -> Any:
    """Return the value of a dotted name, if it begins with a global of the function; else None."""
    if isinstance(node, ast.Attribute):
        base = value_of(node.value, source)
        return None if base is None else getattr(base, node.attr, None)
    if isinstance(node, ast.Name) and not any(
        node.id in (*code.co_varnames, *code.co_cellvars, *code.co_freevars)
        for code in codes(source.function.__code__)
    ):
        return source.function.__globals__.get(node.id)
    return None
