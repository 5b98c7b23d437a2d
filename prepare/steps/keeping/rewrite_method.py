"""Replace calls in the methods of a module by operators that keep the layout; its class stays as it is.

What does not work, or costs more:

- A trace of the forward (torch.fx): video autoencoders loop over frames, keep caches, and branch on shapes.
- A mode of torch (`TorchFunctionMode`) around the call of the model, with the same operators. It leaves as
  many breaks, but runs for every call of a function of torch. A forward of 22 ms (HunyuanVideo's autoencoder,
  small) took 8 % more processor time, one of 36 ms (Wan's) 20 %; with hooks that put the mode on, 11 % and
  27 %. Measured with operators that serve nothing, torch 2.13, one thread, a busy machine, 2026-11-27.
"""

from __future__ import annotations

import ast
import copy
import operator as arithmetic
from collections.abc import Callable, Iterable
from functools import lru_cache, update_wrapper
from types import CellType, CodeType, FunctionType
from typing import TYPE_CHECKING, Any

from prepare.core.model.replaced_method import ReplacedMethod, replaced_methods
from prepare.steps.keeping import operators
from prepare.steps.keeping.find_calls import calls_of, method_owner, operator_of, value_of
from prepare.steps.keeping.method_source import MethodSource, method_source

if TYPE_CHECKING:
    from torch import nn

_PREFIX = "_keeping_"
_STEP = "keep_layout"


def replaced_calls(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the calls that are replaced in a module."""
    return tuple(call for _, method in _own(module) for call in method.args[1])


def replace_calls(module: nn.Module, names: Iterable[str]) -> None:
    """Replace the calls of these names in a module, beside those that are replaced."""
    wanted, by_method = {*names, *replaced_calls(module)}, dict[str, list[str]]()
    for call in calls_of(module):
        if call.name in wanted:
            by_method.setdefault(call.method, []).append(call.name)
    for method, found in by_method.items():
        vars(module)[method] = _replaced(module, method, tuple(dict.fromkeys(found)))


def put_back(module: nn.Module) -> None:
    """Give a module the methods of its class back, also where another program has kept ours."""
    for name, method in _own(module):
        if name == method.__name__:
            del vars(module)[name]
        else:
            vars(module)[name] = method.__wrapped__


def _own(module: nn.Module) -> list[tuple[str, ReplacedMethod]]:
    return [each for each in replaced_methods(module) if each[1].step == _STEP]


def _replaced(module: nn.Module, method: str, names: tuple[str, ...]) -> ReplacedMethod:
    """Return the method of a module with these calls replaced; what a pickle calls."""
    owner: Any = method_owner(type(module), method)
    source = method_source(owner, method)
    function = vars(owner)[method]
    if source is not None and source.tree is not None and source.function is function:
        function = _rewritten(owner, method, source, function.__code__, frozenset(names))
    return ReplacedMethod(module, method, function, _replaced, (method, names), _STEP)


@lru_cache(maxsize=1024)
def _rewritten(
    owner: type, method: str, source: MethodSource, _: CodeType, names: frozenset[str]
) -> FunctionType:
    function = source.function
    replaced = _Replace(source, names, f"{owner.__qualname__}.{method}: ")
    body: Any = replaced.visit(copy.deepcopy(source.tree))
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    cells.update((name, CellType(value)) for name, value in replaced.used.items())
    code = source.compiled(body, owner.__name__, cells)
    cells.setdefault("__class__", CellType(owner))
    closure = tuple(cells[name] for name in code.co_freevars)
    made = FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, closure
    )
    made.__kwdefaults__ = function.__kwdefaults__
    update_wrapper(made, function)
    del vars(made)["__wrapped__"]  # its own code is what runs
    return made


class _Replace(ast.NodeTransformer):
    """Replaces calls of these names by operators; a nested call first.

    `F.pad(x, size)` becomes `_keeping_F_pad(F.pad)(x, size)`, `x.clone()` becomes `_keeping_x_clone(x)`.
    """

    def __init__(self, source: MethodSource, names: frozenset[str], prefix: str) -> None:
        self._source, self._names, self._prefix = source, names, prefix
        self.used: dict[str, Callable[..., Any]] = {}

    def visit(self, node: Any) -> Any:
        operator = operator_of(node, self._source)
        if operator is None or self._prefix + ast.unparse(node) not in self._names:
            return self.generic_visit(node)
        function = value_of(node.func, self._source) if isinstance(node, ast.Call) else None
        text = "x_" + operator if function is None else ast.unparse(node.func).replace(".", "_")
        name = ast.Name(_PREFIX + text, ast.Load())
        self.used[name.id] = _replacement(operator, node, function)
        made = self._made(name, self.generic_visit(node), is_function=function is not None)
        return ast.fix_missing_locations(ast.copy_location(made, node))

    def _made(self, name: ast.Name, node: Any, *, is_function: bool) -> ast.Call:
        if isinstance(node, ast.BinOp):
            return ast.Call(name, [node.left, node.right], [])
        if is_function:
            return ast.Call(ast.Call(name, [node.func], []), node.args, node.keywords)
        return ast.Call(name, [node.func.value, *node.args], node.keywords)


def _replacement(operator: str, node: Any, function: Any) -> Callable[..., Any]:
    """Return what serves a call, or chooses what serves it: the function may be another by then."""
    serve = getattr(operators, operator)
    if isinstance(node, ast.BinOp):
        return operators.otherwise(serve, getattr(arithmetic, operator))
    if function is None:
        return operators.otherwise(serve, operators.method(operator))
    ours = operators.otherwise(serve, function)

    def chosen(found: Any) -> Any:
        return ours if found is function else found

    return chosen
