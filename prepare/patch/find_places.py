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
        calls = find_calls(_class_of(model, place))
        for call in calls_of_place(model, place):
            group = (each for each in calls if group_of(each) == group_of(call))
            found.update((each.name, each) for each in group)
    return _grouped(found.values(), seen)


def calls_in_methods(model: nn.Module, flow: Flow, seen: Container[str]) -> list[list[CodeCall]]:
    """Return groups of all calls in the methods that have breaks and copies, but for arithmetic."""
    found: dict[str, CodeCall] = {}
    for place in _places(flow):
        for call in find_calls(_class_of(model, place)):
            source = method_source(vars(call.owner)[call.method])
            assert source is not None  # the call was found in it
            lines = source[1].lineno, source[1].end_lineno or 0
            if call.operator not in ("add", "mul") and _is_at(place, call.file, lines):
                found[call.name] = call
    return _grouped(found.values(), seen)


def calls_of_place(model: nn.Module, place: Event | Copy) -> Iterator[CodeCall]:
    """Yield the calls that may be at the line of an event or a copy."""
    operator = place.operation.removeprefix("aten.")
    for call in find_calls(_class_of(model, place)):
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


def _class_of(model: nn.Module, place: Event | Copy) -> type[nn.Module]:
    return original_class(type(model.get_submodule(place.module)))


def _is_at(place: Event | Copy, path: str, lines: tuple[int, int]) -> bool:
    file, _, line = place.source.rpartition(":")
    return lines[0] <= int(line) <= lines[1] and short_path(path) == file


def _grouped(calls: Iterable[CodeCall], seen: Container[str]) -> list[list[CodeCall]]:
    groups: dict[Hashable, list[CodeCall]] = {}
    for call in calls:
        if not call.obstacle and call.name not in seen:
            groups.setdefault(group_of(call), []).append(call)
    return list(groups.values())
