"""Make a subclass of a module class in which calls are replaced by operators that keep the layout."""

from __future__ import annotations

import __future__  # isort: skip
import ast
import copy
import copyreg
from functools import lru_cache, update_wrapper
from types import CellType, CodeType, FunctionType
from typing import TYPE_CHECKING, Any

from prepare.core.model.scripting import script_error
from prepare.steps.keeping import operators
from prepare.steps.keeping.find_calls import (
    CodeCall,
    find_calls,
    method_source,
    operator_of,
    value_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn

_ORIGINAL = "_prepare_original"
_CALLS = "_prepare_calls"
_PREFIX = "_keeping_"


def original_class(cls: type[nn.Module]) -> type[nn.Module]:
    """Return the class that a rewritten class was made of, or the class itself."""
    return vars(cls).get(_ORIGINAL, cls)


def rewritten_calls(cls: type[nn.Module]) -> tuple[str, ...]:
    """Return the names of the calls that are replaced in a class."""
    return vars(cls).get(_CALLS, ())


def rewritten(cls: type[nn.Module], names: Iterable[str]) -> type[nn.Module]:
    """Return a subclass of `cls` in which the calls of these names are replaced; `cls` if there are none.

    It is the same class each time. It has the name of `cls`, and its instances can be pickled and copied:
    they are rebuilt from `cls`.
    """
    wanted = set(names)
    chosen = tuple(c for c in find_calls(cls) if c.name in wanted and not c.obstacle)
    original: Any = cls  # a class is hashable, which mypy denies
    return _subclass(original, chosen) if chosen else cls


@lru_cache(maxsize=1024)
def _subclass(cls: Any, calls: tuple[CodeCall, ...]) -> Any:
    members: dict[str, Any] = {
        _ORIGINAL: cls,
        _CALLS: tuple(dict.fromkeys(call.name for call in calls)),
        "__reduce_ex__": _reduce,
        "__prepare_scriptable__": _refuse_script,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
    }
    for method in dict.fromkeys(call.method for call in calls):
        members[method] = _rewritten_method([call for call in calls if call.method == method])
    return type(cls)(cls.__name__, (cls,), members)


def _rewritten_method(calls: list[CodeCall]) -> FunctionType:
    owner, method = calls[0].owner, calls[0].method
    source = method_source(vars(owner)[method])
    assert source is not None  # the calls were found in it
    function, definition = source
    names = {call.name for call in calls}
    replaced = _Replace(function, names, f"{owner.__qualname__}.{method}: ")
    body = replaced.visit(copy.deepcopy(definition))
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    cells.update((_PREFIX + name, CellType(getattr(operators, name))) for name in replaced.used)
    code = _compiled(body, owner.__name__, sorted({*cells} - {"__class__"}), function.__code__)
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
    """Replaces calls of these names by operators; a nested call first."""

    def __init__(self, function: FunctionType, names: set[str], prefix: str) -> None:
        self._function, self._names, self._prefix = function, names, prefix
        self.used: set[str] = set()

    def visit(self, node: ast.AST) -> Any:
        operator = operator_of(node, self._function)
        if operator is None or self._prefix + ast.unparse(node) not in self._names:
            return self.generic_visit(node)
        is_method = isinstance(node, ast.Call) and value_of(node.func, self._function) is None
        self.used.add(operator)
        made = self._made(operator, self.generic_visit(node), is_method=is_method)
        return ast.fix_missing_locations(ast.copy_location(made, node))

    def _made(self, operator: str, node: Any, *, is_method: bool) -> ast.Call:
        name = ast.Name(_PREFIX + operator, ast.Load())
        if isinstance(node, ast.BinOp):
            return ast.Call(name, [node.left, node.right], [])
        return ast.Call(
            name, [node.func.value, *node.args] if is_method else node.args, node.keywords
        )


def _compiled(
    definition: ast.FunctionDef, owner: str, names: list[str], original: CodeType
) -> CodeType:
    """Compile a method of the class `owner` whose free variables are `names`, and `__class__`."""
    # A class, so that private names are mangled and super() has its cell.
    inner = ast.ClassDef(owner, [], [], [definition], [])
    parameters = ast.arguments([], [ast.arg(name) for name in names], None, [], [], None, [])
    factory = ast.FunctionDef("factory", parameters, [inner], [])
    module = ast.fix_missing_locations(ast.Module([factory], []))
    flags = original.co_flags & __future__.annotations.compiler_flag
    code = compile(module, original.co_filename, "exec", flags=flags, dont_inherit=True)
    for name in ("factory", owner, definition.name):
        code = next(c for c in code.co_consts if isinstance(c, CodeType) and c.co_name == name)
    return code.replace(co_qualname=original.co_qualname)


def _reduce(self: nn.Module, protocol: int) -> Any:
    """Pickle a module as one of its original class, and the names of its calls."""
    cls: Any = type(self)
    made: Any = next(base for base in cls.__mro__ if _ORIGINAL in vars(base))
    reduced: Any = super(made, self).__reduce_ex__(max(int(protocol), 2))
    is_default = isinstance(reduced, tuple) and reduced[0] is copyreg.__dict__["__newobj__"]
    if not is_default or cls is not made:
        return reduced
    return _new, (vars(cls)[_ORIGINAL], vars(cls)[_CALLS], *reduced[1][1:]), *reduced[2:]


def _refuse_script(module: nn.Module) -> None:
    raise script_error(module, "keep_layout")


def _new(original: type[nn.Module], names: tuple[str, ...], *args: Any) -> nn.Module:
    cls = rewritten(original, names)
    return cls.__new__(cls, *args)
