"""Read the source of a method, make sure that it is the code that is loaded, and compile it again."""

from __future__ import annotations

import __future__  # isort: skip
import ast
import copy
import inspect
import linecache
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

# The parts of a statement that hold other statements.
_BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")
_TORCH = str(Path(torch.__file__).parent)


@dataclass(frozen=True, slots=True)
class MethodSource:
    """A function, its syntax tree with the line numbers of its file, and the names that the file imports.

    The tree is None if it is not that of the function's code: the file has been changed since.
    """

    function: FunctionType
    tree: ast.FunctionDef | None
    imported: frozenset[str]

    def compiled(self, tree: ast.FunctionDef, owner: str, names: Iterable[str]) -> CodeType:
        """Compile a tree as this function of the class `owner`; `names` are its free variables."""
        # A class, so that private names are mangled and super() has its cell; its own name stays global.
        free, code = sorted({*names} - {"__class__"}), self.function.__code__
        body: list[ast.stmt] = [] if owner in free else [ast.Global([owner])]
        undecorated = copy.copy(tree)
        undecorated.decorator_list = []
        body.append(ast.ClassDef(owner, [], [], [undecorated], []))
        parameters = ast.arguments([], [ast.arg(name) for name in free], None, [], [], None, [])
        # Python compiles calls of what the file imports in another way.
        used = sorted(self.imported & {name for each in codes(code) for name in each.co_names})
        imports = [ast.Import([ast.alias(name)]) for name in used]
        module: Any = ast.Module([*imports, ast.FunctionDef("factory", parameters, body, [])], [])
        flags = code.co_flags & __future__.annotations.compiler_flag
        made: Any = compile(
            ast.fix_missing_locations(module), code.co_filename, "exec", flags, dont_inherit=True
        )
        for name in ("factory", owner, tree.name):
            made = next(c for c in made.co_consts if isinstance(c, CodeType) and c.co_name == name)
        return made.replace(co_qualname=code.co_qualname)


def method_source(owner: type, method: str) -> MethodSource | None:
    """Return the source of a method that a class defines, without its decorators.

    None if it is a function of torch, or its source is not there.
    """
    defined = vars(owner).get(method)
    function = inspect.unwrap(defined) if isinstance(defined, FunctionType) else None
    if not isinstance(function, FunctionType) or function.__code__.co_filename.startswith(_TORCH):
        return None
    # With the code, which may be exchanged, as IPython's autoreload does.
    return _source(owner.__name__, function, function.__code__)


@lru_cache(maxsize=4096)
def _source(owner: str, function: FunctionType, code: CodeType) -> MethodSource | None:
    linecache.checkcache(file := inspect.getsourcefile(code) or "")
    if not (lines := linecache.getlines(file, function.__globals__)):
        return None
    try:
        trees, imported = _parsed("".join(lines))
        tree = trees[code.co_firstlineno, code.co_name]
    except (SyntaxError, ValueError, KeyError):
        return MethodSource(function, None, frozenset())
    found = MethodSource(function, tree, imported)
    is_loaded = _bare(found.compiled(tree, owner, code.co_freevars)) == _bare(code)
    return found if is_loaded else MethodSource(function, None, imported)


class _File(NamedTuple):
    """The functions of a file, by their first line and name, and the names that it imports."""

    functions: Mapping[tuple[int, str], ast.FunctionDef]
    imported: frozenset[str]


@lru_cache(maxsize=64)
def _parsed(text: str) -> _File:
    functions: dict[tuple[int, str], ast.FunctionDef] = {}
    imported: set[str] = set()
    pending: list[tuple[Any, bool]] = [(ast.parse(text), True)]
    for node, is_outside in pending:
        if isinstance(node, ast.FunctionDef):
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            functions[first, node.name] = node
        elif isinstance(node, ast.Import | ast.ImportFrom) and is_outside:
            imported |= {(each.asname or each.name).partition(".")[0] for each in node.names}
        inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        parts = (part for block in _BLOCKS for part in getattr(node, block, ()))
        pending += [(part, is_outside and not inside) for part in parts]
    return _File(functions, frozenset(imported))


def codes(code: CodeType) -> list[CodeType]:
    """Return a code and those of the functions and comprehensions inside it."""
    found = [code]
    for each in found:
        found += [inner for inner in each.co_consts if isinstance(inner, CodeType)]
    return found


def _bare(code: CodeType) -> CodeType:
    """Return a code without its lines, and without the flag of a function in a function."""
    return code.replace(
        co_firstlineno=1,
        co_linetable=b"",
        co_flags=code.co_flags & ~inspect.CO_NESTED,
        co_consts=tuple(_bare(c) if isinstance(c, CodeType) else c for c in code.co_consts),
    )
