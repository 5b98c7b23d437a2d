"""Find the calls in the code of a model at the breaks and copies of its layout flow, and beside them."""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterable, Iterator
from typing import TYPE_CHECKING

from prepare.flow.call_sites import short_path
from prepare.steps.keeping.find_calls import CodeCall, find_calls, method_source
from prepare.steps.keeping.rewrite_class import original_class

if TYPE_CHECKING:
    from torch import nn

    from prepare.flow.records import Copy, Event, Flow

# The parts of the names of torch's operators that an operator of the step runs.
_RUNS: dict[str, tuple[str, ...]] = {
    "pad": ("pad", "copy", "clone"),
    "cat": ("cat",),
    "stack": ("stack", "cat"),
    "interpolate": ("upsample",),
    "avg_pool3d": ("avg_pool3d",),
    "where": ("where",),
    "softmax": ("softmax",),
    "clone": ("clone",),
    "contiguous": ("clone",),
    "repeat": ("repeat",),
    "repeat_interleave": ("clone", "index", "view"),
    "view": ("view", "permute", "clone"),
    "reshape": ("view", "permute", "clone"),
    "flatten": ("view", "permute", "clone"),
    "rearrange": ("view", "permute", "clone"),
    "add": ("add",),
    "mul": ("mul",),
    "empty_like": ("empty",),
    "zeros_like": ("zeros",),
    "ones_like": ("ones",),
}


def calls_at_places(model: nn.Module, flow: Flow, seen: Container[str]) -> list[list[CodeCall]]:
    """Return groups of the calls that run the operators of the breaks and copies of a flow."""
    found: dict[str, CodeCall] = {}
    for place in _places(flow):
        calls = find_calls(_class_of(model, place.module))
        for call in calls_of_place(model, place):
            group = (each for each in calls if group_of(each) == group_of(call))
            found.update((each.name, each) for each in group)
    return _grouped(found.values(), seen)


def calls_in_methods(model: nn.Module, flow: Flow, seen: Container[str]) -> list[list[CodeCall]]:
    """Return groups of the calls, but for arithmetic, in the methods that have breaks and copies.

    For a copy in a module of torch these are the methods of the module that holds it.
    """
    found: dict[str, CodeCall] = {}
    for place in (*_places(flow), *flow.copies):
        calls = [call for call in find_calls(_class_of(model, place.module)) if _is_in(place, call)]
        holder = place.module.rpartition(".")[0]
        for call in calls or find_calls(_class_of(model, holder)):
            if call.operator not in ("add", "mul"):
                found[call.name] = call
    return _grouped(found.values(), seen)


def calls_of_place(model: nn.Module, place: Event | Copy) -> Iterator[CodeCall]:
    """Yield the calls that may be at the line of an event or a copy."""
    operator = place.operation.removeprefix("aten.")
    for call in find_calls(_class_of(model, place.module)):
        if _is_at(place, call.file, call.lines) and any(
            part in operator for part in _RUNS[call.operator]
        ):
            yield call


def group_of(call: CodeCall) -> Hashable:
    """Return a key of the calls to replace together: `.contiguous()` and the `view` that may need it."""
    is_pair = call.operator in ("contiguous", "view")
    return (call.owner, call.method) if is_pair else call.name


def _places(flow: Flow) -> Iterator[Event | Copy]:
    for event in flow.events:
        if event.kind == "break" and event.source:
            yield event
    yield from (copy for copy in flow.copies if copy.source)


def _class_of(model: nn.Module, name: str) -> type[nn.Module]:
    return original_class(type(model.get_submodule(name)))


def _is_in(place: Event | Copy, call: CodeCall) -> bool:
    """Return whether a break or copy is in the method of a call."""
    source = method_source(vars(call.owner)[call.method])
    assert source is not None  # the call was found in it
    return _is_at(place, call.file, (source[1].lineno, source[1].end_lineno or 0))


def _is_at(place: Event | Copy, path: str, lines: tuple[int, int]) -> bool:
    file, _, line = place.source.rpartition(":")
    return bool(line) and lines[0] <= int(line) <= lines[1] and short_path(path) == file


def _grouped(calls: Iterable[CodeCall], seen: Container[str]) -> list[list[CodeCall]]:
    groups: dict[Hashable, list[CodeCall]] = {}
    for call in calls:
        if not call.obstacle and call.name not in seen:
            groups.setdefault(group_of(call), []).append(call)
    return list(groups.values())
