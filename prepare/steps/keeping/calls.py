"""Find the calls in a model's own code that may lose a layout, choose those that gain, and replace them.

What does not work, or costs more:

- A trace of the forward (torch.fx): video autoencoders loop over frames, keep caches, and branch on shapes.
- A mode of torch (`TorchFunctionMode`) around the call of the model, with the same operators. It leaves as
  many breaks, but runs for every call of a function of torch. A forward of 22 ms (HunyuanVideo's autoencoder,
  small) took 8 % more processor time, one of 36 ms (Wan's) 20 %; with hooks that put the mode on, 11 % and
  27 %. Measured with operators that serve nothing, torch 2.13, one thread, a busy machine, 2026-11-27.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping

import __future__  # isort: skip
import ast
import copy
import inspect
import linecache
import operator as arithmetic
from dataclasses import dataclass
from functools import lru_cache, update_wrapper
from pathlib import Path
from types import CellType, CodeType, FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from prepare.core.model.module_kinds import ReplacedMethod, foreign_method, replaced_methods
from prepare.core.model.module_tree import copy_tree
from prepare.registry import STEPS
from prepare.steps.keeping import operators

if TYPE_CHECKING:
    from prepare.core.forward.torch_state import Amp
    from prepare.stages.flow.records import Flow

# The functions that are replaced, and the methods of tensors, by the name of the operator that replaces them.
FUNCTIONS: dict[Any, str] = {
    F.pad: "pad",
    torch.cat: "cat",
    torch.concat: "cat",
    torch.concatenate: "cat",
    torch.clone: "clone",
    torch.repeat_interleave: "repeat_interleave",
    torch.flatten: "flatten",
}
METHODS = ("clone", "contiguous", "flatten", "repeat", "repeat_interleave", "reshape", "view")
# These change nothing but strides. A `.contiguous()` may be there on purpose, `view` needs it, and reshapes
# and `+` are everywhere, so these are replaced only if they are named.
SAFE = frozenset({*FUNCTIONS.values(), "clone", "repeat"}) - {"flatten"}


@dataclass(frozen=True, slots=True)
class CodeCall:
    """One call in a method of a module class.

    `name` is `WanCausalConv3d.forward: F.pad(x, padding)`: the class, the method and the code. `operator`
    replaces it. `file` and `lines` are the file and its first and last line.
    """

    name: str
    operator: str
    owner: type
    method: str
    file: str
    lines: tuple[int, int]


def find_calls(cls: type[nn.Module]) -> tuple[CodeCall, ...]:
    """Return the calls that can be replaced in the methods of a class, and in those of its bases but torch's.

    A method is left alone if it is decorated, or overridden, or if Python looks for it in the class alone, or
    if its file has been changed since it was loaded.
    """
    return tuple(
        call
        for owner in _owners(cls)
        for method, function in vars(owner).items()
        if isinstance(function, FunctionType) and method_owner(cls, method) is owner
        for call in _calls_in(owner, method, function, function.__code__)
    )


def calls_of(module: nn.Module) -> Iterator[CodeCall]:
    """Yield the calls that can be replaced in a module: those of the methods that run in it."""
    for call in find_calls(type(module)):
        if foreign_method(module, call.method) is None:
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
    if source is None or source.function is not defined or method[:2] == method[-2:] == "__":
        return ()
    where, file = f"{owner.__qualname__}.{method}", defined.__code__.co_filename
    found = []
    for node in ast.walk(source.tree):
        if isinstance(node, ast.expr) and (operator := operator_of(node, source)):
            name, lines = f"{where}: {ast.unparse(node)}", (node.lineno, node.end_lineno or 0)
            found.append(CodeCall(name, operator, owner, method, file, lines))
    return tuple(found)


def operator_of(node: ast.AST, source: MethodSource) -> str | None:
    """Return the name of the operator that can replace a node of a function's tree, or None."""
    if isinstance(node, ast.BinOp):
        return "add" if isinstance(node.op, ast.Add) else None
    if not isinstance(node, ast.Call):
        return None
    operator, found = None, value_of(node.func, source)
    if getattr(found, "__module__", "") == "einops.einops":
        operator = "rearrange" if found.__name__ == "rearrange" else None
    elif found is not None:
        operator = FUNCTIONS.get(found) if isinstance(found, Hashable) else None
    elif isinstance(node.func, ast.Attribute) and node.func.attr in METHODS:
        operator = node.func.attr
    return operator


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
    if source is not None and source.function is function:
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
        return operators.otherwise(serve, arithmetic.add)
    if function is None:
        return operators.otherwise(serve, operators.method(operator))
    ours = operators.otherwise(serve, function)

    def chosen(found: Any) -> Any:
        return ours if found is function else found

    return chosen


# The parts of a statement that hold other statements.
_BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")
_TORCH = str(Path(torch.__file__).parent)


@dataclass(frozen=True, slots=True)
class MethodSource:
    """A function, its syntax tree with the line numbers of its file, and the names that the file imports."""

    function: FunctionType
    tree: ast.FunctionDef
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

    None if it is a function of torch, or its source is not there, or is not that of its code.
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
        return None
    found = MethodSource(function, tree, imported)
    is_loaded = _bare(found.compiled(tree, owner, code.co_freevars)) == _bare(code)
    return found if is_loaded else None


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


@dataclass(frozen=True, slots=True)
class ChosenCalls:
    """The calls to replace, and the flows without and with them."""

    calls: tuple[CodeCall, ...]
    before: Flow
    after: Flow

    @property
    def names(self) -> tuple[str, ...]:
        """The option `calls` of the step."""
        return tuple(call.name for call in self.calls)


def choose_calls(model: nn.Module, example: Any, *, amp: Amp = "none") -> ChosenCalls:
    """Return the calls to replace in a model that is prepared but for this step; changes nothing.

    These are the calls that would return another layout than torch. Those that may be there on purpose
    (`.contiguous()`, views) are added if the flow is better with them.
    """
    from prepare.stages.flow import predict

    bare = copy_tree(model)  # shares the tensors, which predict does not change
    STEPS[_STEP].undo(bare)
    before = predict(bare, example, amp=amp)
    choice = ChosenCalls((), before, before)
    if before.status != "ok" or cost_of(before) == (0, 0):
        return choice
    calls = [call for module in bare.modules() for call in calls_of(module)]

    def choice_of(acting: list[CodeCall]) -> ChosenCalls:
        made = {_method_of(call) for call in acting if call.operator == "contiguous"}
        # A `view` may need the `.contiguous()` before it, in a branch that has not run.
        views = [c for c in calls if c.operator == "view" and _method_of(c) in made]
        chosen = {call.name: call for call in (*acting, *views)}
        tree, wanted = kept(bare, chosen), before.wanted
        after = predict(tree, example, wanted=wanted, amp=amp)
        return ChosenCalls(tuple(chosen.values()), before, after)

    for words in (SAFE, {call.operator for call in calls}):
        allowed = [call for call in calls if call.operator in words]
        with operators.recording() as seen:
            predict(kept(bare, [c.name for c in allowed]), example, amp=amp)
        # The same code may stand in a method twice.
        acting = list({call.name: call for call in allowed if _is_seen(call, seen)}.values())
        found = choice_of(acting)
        if _is_worse(found.after, choice.after) or cost_of(found.after) >= cost_of(choice.after):
            continue
        choice = found
        for call in acting[::-1]:
            fewer = choice_of([each for each in acting if each is not call])
            if not _is_worse(fewer.after, choice.after):
                acting, choice = [each for each in acting if each is not call], fewer
    return choice


def kept(model: nn.Module, names: Iterable[str]) -> nn.Module:
    """Return a copy of the module tree, with shared tensors, in which these calls are replaced."""
    step: Any = STEPS[_STEP].from_options({"calls": [*names]})
    tree = copy_tree(model)
    for name in list(step.targets(tree)):
        step.rewrite(tree, name)
    return tree


def _is_worse(flow: Flow, other: Flow) -> bool:
    """Return whether a flow has more copied bytes or breaks, or gives a custom kernel another layout."""
    from prepare.stages.flow.operator_watcher import KERNEL_NOTE

    given = {note for note in flow.notes if note.endswith(KERNEL_NOTE)}
    costs_more = any(map(arithmetic.gt, cost_of(flow), cost_of(other)))
    return flow.status != "ok" or costs_more or not given <= {*other.notes}


def cost_of(flow: Flow) -> tuple[int, int]:
    """Return the copied bytes and the breaks of a flow."""
    return flow.summary["copied_bytes"], flow.summary["breaks"]


def _is_seen(call: CodeCall, seen: Iterable[tuple[Any, str, int]]) -> bool:
    return any(
        operator is getattr(operators, call.operator)
        and file == call.file
        and call.lines[0] <= line <= call.lines[1]
        for operator, file, line in seen
    )


def _method_of(call: CodeCall) -> Hashable:
    return call.owner, call.method
