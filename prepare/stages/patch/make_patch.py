"""Make the patch of a prepared model: the diff of its code, what each change saves, and what stays."""

from __future__ import annotations

import ast
import copy
import difflib
import inspect
from collections import Counter
from itertools import accumulate, groupby, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prepare.core.model import transforms
from prepare.stages.flow.call_sites import short_path
from prepare.stages.patch.records import Patch, PatchedCall, UnpatchedBreak
from prepare.steps.keeping import memory_order, operators
from prepare.steps.keeping.choose_calls import ChosenCalls, calls_of_place, cost_of
from prepare.steps.keeping.find_calls import CodeCall, find_calls, operator_of, value_of
from prepare.steps.keeping.method_source import method_source
from prepare.steps.repairs import base

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from types import ModuleType

    from torch import nn

    from prepare.stages.flow.records import Event

# The prefixes of operators in a patch, and of their calls.
_PREFIX, _CALL = "_keep_", "_kept_"
# The modules that define the operators and what they use of ours, each before its use.
_SOURCES = transforms, base, memory_order, operators
# The names of their own module that operators use, as any other module can write it.
_WRITTEN = {"F": "torch.nn.functional", "Tensor": "torch.Tensor", "FORMATS": f"{_PREFIX}formats"}
_HEADER = """
# Operators of torch that keep the memory format channels-last of their operands.
_keep_formats = {4: torch.channels_last, 5: torch.channels_last_3d}
"""


def make_patch(model: nn.Module, chosen: ChosenCalls) -> Patch:
    """Return the patch that replaces the chosen calls in the source of the model, not timed or verified."""
    return Patch(
        diff=write_diff(chosen.calls),
        calls=tuple(
            PatchedCall(
                name=call.name,
                source=f"{short_path(call.file)}:{call.lines[0]}",
                copied_bytes=copied,
                breaks=breaks,
            )
            for call, (copied, breaks) in zip(chosen.calls, chosen.saved, strict=True)
        ),
        left=tuple(_left(model, chosen)),
        before=cost_of(chosen.before),
        after=cost_of(chosen.after),
    )


def _left(model: nn.Module, chosen: ChosenCalls) -> Iterator[UnpatchedBreak]:
    """Yield the breaks that stay, added up for each place, the most frequent first."""
    counts: Counter[tuple[str, str, str]] = Counter()
    for event in chosen.after.events:
        if event.kind == "break":
            source = event.source or f"{event.type} ({event.module})"
            counts[source, event.cause, _reason(model, chosen, event)] += event.count
    for (source, cause, reason), count in counts.most_common():
        yield UnpatchedBreak(source=source, cause=cause, breaks=count, reason=reason)


def _reason(model: nn.Module, chosen: ChosenCalls, event: Event) -> str:
    if not event.source:
        return "it is inside a module of torch; repair_layout repairs those that it knows"
    calls = list(calls_of_place(model, event))
    if not calls:
        return f"no replacement is known for {event.operation} there"
    if obstacle := next(filter(None, (call.obstacle for call in calls)), ""):
        return obstacle
    if event.phase == "backward":
        return "the gradient loses it, which the call cannot prevent"
    return "it is changed" if calls[0].name in chosen.names else "a change removes no break"


def write_diff(calls: Iterable[CodeCall]) -> str:
    """Return a unified diff that replaces these calls, with paths from the folder of the packages.

    Each file gets the operators that it uses after its imports, so that it needs nothing but torch.
    """
    parts: list[str] = []
    # The same code may be in a method more than once: all calls with these names.
    matching = [each for c in calls for each in find_calls(c.owner) if each.name == c.name]
    ordered = sorted(matching, key=lambda call: (call.file, call.lines, call.name))
    for file, of_file in groupby(ordered, key=lambda call: call.file):
        before = Path(file).read_text(encoding="utf-8")
        after = patched_source(before, list(of_file))
        path = short_path(file).lstrip("/")
        parts += difflib.unified_diff(
            before.splitlines(keepends=True),
            after.splitlines(keepends=True),
            f"a/{path}",
            f"b/{path}",
        )
    # A file whose last line has no newline cannot be written otherwise.
    return "".join(p if p.endswith("\n") else f"{p}\n\\ No newline at end of file\n" for p in parts)


def patched_source(source: str, calls: list[CodeCall]) -> str:
    """Return the source of one file with these calls replaced and the operators added."""
    # Not `splitlines`, which also splits at form feeds.
    lines = [f"{line}\n".encode() for line in source.split("\n")]
    starts = list(accumulate(map(len, lines), initial=0))
    text = b"".join(lines)[:-1]
    edits: list[tuple[int, int, bytes]] = []
    tree, used = ast.parse(source), dict[str, str]()
    wanted = {(call.name, call.lines[0]): call for call in calls}
    for call in wanted.values():
        for node, function in _nodes(tree, call):
            name = _CALL + (function.replace(".", "_") or f"x_{call.operator}")
            used[name] = f"{_PREFIX}otherwise({_PREFIX}{call.operator}, {_else(node, function)})"
            edits += _edits(node, name, text, starts, is_function=bool(function))
    at = starts[_last_import(tree)]
    has_torch = any(
        isinstance(node, ast.Import)
        and any(name.name == "torch" and not name.asname for name in node.names)
        for node in tree.body
    )
    head = "" if has_torch else "import torch\n"
    helpers = {"otherwise", "method"} if used else set()
    definitions = _definitions({*helpers, *(call.operator for call in calls)})
    written = "".join(f"{name} = {value}\n" for name, value in used.items())
    edits.append((at, at, f"{head}{_HEADER}\n\n{definitions}\n\n\n{written}".encode()))
    # The last edit first, so that the places of the others stay; of two at one place the inner call.
    for start, end, new in sorted(edits, reverse=True):
        text = text[:start] + new + text[end:]
    ast.parse(text.decode())
    return text.decode()


def _nodes(tree: ast.Module, call: CodeCall) -> Iterator[tuple[ast.expr, str]]:
    """Yield the nodes of the file that a call names, and the function in it, if it is none of an object."""
    source = method_source(call.owner, call.method)
    assert source is not None  # the call was found in it
    code = call.name.partition(": ")[2]
    for node in ast.walk(tree):
        if not isinstance(node, ast.expr) or (node.lineno, node.end_lineno) != call.lines:
            continue
        if operator_of(node, source) == call.operator and ast.unparse(node) == code:
            is_function = isinstance(node, ast.Call) and value_of(node.func, source) is not None
            yield node, ast.unparse(node.func) if isinstance(node, ast.Call) and is_function else ""


def _else(node: Any, function: str) -> str:
    """Return the code of what runs where an operator does not serve a call."""
    if isinstance(node, ast.BinOp):
        return f"lambda a, b: a {'+' if isinstance(node.op, ast.Add) else '*'} b"
    return function or f'{_PREFIX}method("{node.func.attr}")'


def _edits(
    node: ast.expr, name: str, text: bytes, starts: list[int], *, is_function: bool
) -> Iterator[tuple[int, int, bytes]]:
    """Yield the edits (first byte, last byte, new text) that make a node a call of `name`."""

    def first(part: ast.expr | ast.keyword) -> int:
        return starts[part.lineno - 1] + part.col_offset

    def last(part: ast.expr) -> int:
        assert part.end_lineno is not None
        assert part.end_col_offset is not None
        return starts[part.end_lineno - 1] + part.end_col_offset

    begin = name.encode()
    if isinstance(node, ast.BinOp):
        sign = text.index(b"+" if isinstance(node.op, ast.Add) else b"*", last(node.left))
        yield first(node), first(node), begin + b"("
        yield sign, sign + 1, b","
        yield last(node), last(node), b")"
        return
    assert isinstance(node, ast.Call)
    if is_function:
        yield first(node.func), last(node.func), begin
        return
    assert isinstance(node.func, ast.Attribute)
    dot = text.rindex(b".", 0, last(node.func))
    bracket = text.index(b"(", last(node.func))
    yield first(node), first(node), begin + b"("
    yield dot, bracket + 1, b", " if node.args or node.keywords else b""


def _last_import(tree: ast.Module) -> int:
    """Return the number of lines up to the last import before the first class or function."""
    top = takewhile(lambda node: not isinstance(node, ast.ClassDef | ast.FunctionDef), tree.body)
    imports = (node for node in top if isinstance(node, ast.Import | ast.ImportFrom))
    return max((node.end_lineno or 0 for node in imports), default=0)


def _definitions(names: Iterable[str]) -> str:
    """Return the source of operators and of all that they use of ours, renamed, without annotations."""
    known = {name: node for each in _SOURCES for name, node in _top_level(each)}
    known = {name: node for name, node in known.items() if name not in _WRITTEN}
    needed, pending = set(), list(names)
    while pending:
        name = pending.pop()
        if name not in needed:
            needed.add(name)
            nodes = list(ast.walk(known[name]))
            used = {node.id for node in nodes if isinstance(node, ast.Name)}
            parameters = {node.arg for node in nodes if isinstance(node, ast.arg)}
            pending += (used & known.keys()) - parameters
    renamed = {name: _PREFIX + name.lstrip("_") for name in known} | _WRITTEN
    return "\n\n\n".join(_written(known[name], renamed) for name in known if name in needed)


def _top_level(module: ModuleType) -> Iterator[tuple[str, ast.stmt]]:
    """Yield the functions, classes and values that a module defines."""
    for node in ast.parse(inspect.getsource(module)).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name, node
        elif isinstance(node, ast.Assign) and isinstance(target := node.targets[0], ast.Name):
            yield target.id, node


def _written(definition: ast.stmt, renamed: dict[str, str]) -> str:
    definition = copy.deepcopy(definition)
    own = {node.arg for node in ast.walk(definition) if isinstance(node, ast.arg)}
    for node in ast.walk(definition):
        if isinstance(node, ast.arg):
            node.annotation = None
        if isinstance(node, ast.FunctionDef):
            node.returns = None
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            node.name = renamed.get(node.name, node.name)
        if isinstance(node, ast.Name) and node.id in renamed and node.id not in own:
            node.id = renamed[node.id]
    return ast.unparse(definition)
