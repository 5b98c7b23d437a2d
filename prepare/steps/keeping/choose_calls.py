"""Choose the calls of the step keep_layout: those at the lines that the predicted layout flow names."""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Iterable, Iterator
from dataclasses import dataclass
from operator import gt
from typing import TYPE_CHECKING, Any

from prepare.core.model.module_tree import copy_tree
from prepare.registry import STEPS
from prepare.stages.flow import predict
from prepare.stages.flow.call_sites import short_path
from prepare.stages.flow.operator_watcher import KERNEL_NOTE
from prepare.steps.keeping.find_calls import CodeCall, calls_of, find_calls
from prepare.steps.keeping.method_source import method_source

if TYPE_CHECKING:
    from torch import nn

    from prepare.core.forward.torch_state import Amp
    from prepare.stages.flow.records import Copy, Event, Flow

_STEP = "keep_layout"
# Mended lines may show breaks that others hid. Networks of the benchmarks need two or three rounds.
_ROUNDS = 8
# The parts of the names of torch's operators that an operator of the step runs, if not its own name.
_RUNS: dict[str, tuple[str, ...]] = {
    "pad": ("pad", "copy", "clone"),
    "stack": ("stack", "cat"),
    "interpolate": ("upsample",),
    "contiguous": ("clone",),
    "repeat_interleave": ("clone", "index", "view"),
    **dict.fromkeys(
        ("view", "reshape", "torch_reshape", "flatten", "rearrange"), ("view", "permute", "clone")
    ),
    "empty_like": ("empty",),
    "zeros_like": ("zeros",),
    "ones_like": ("ones",),
}


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


def choose_calls(
    model: nn.Module, example: Any, *, amp: Amp = "none", prune: bool = True
) -> ChosenCalls:
    """Return the calls to replace in a model that is prepared but for this step; changes nothing.

    The calls at the lines of breaks and copies are taken if the flow is not worse with them, and the others
    of their methods if it is better, until no other is named; then, with `prune`, each is dropped without
    which the flow is as good.
    """
    bare = copy_tree(model)  # shares the tensors, which predict does not change
    STEPS[_STEP].undo(bare)
    before = after = predict(bare, example, amp=amp)

    def flow_with(names: Iterable[str]) -> Flow:
        tree, wanted = kept(bare, names), before.wanted
        return predict(tree, example, wanted=wanted, amp=amp)

    chosen: dict[str, CodeCall] = {}
    refused: set[str] = set()
    tried_together = False
    for _ in range(_ROUNDS):
        seen = {*chosen, *refused}
        at_places = _calls_at_places(bare, after, seen)
        groups, is_near = at_places or calls_in_methods(bare, after, seen), not at_places
        if not groups and refused and not tried_together:
            # A call may only move a break to another of its method: a sum before a `.contiguous()`.
            tried_together = True
            groups = calls_in_methods(bare, after, chosen, by_method=True)
        if not groups or after.status != "ok":
            break
        accepted, after = _accepted(flow_with, list(chosen), groups, after, strictly=is_near)
        refused.update(call.name for group in groups for call in group)
        chosen.update((call.name, call) for call in accepted)
    backwards = list(chosen)[::-1]
    views_last = sorted(backwards, key=lambda name: chosen[name].operator == "view")
    for name in views_last if prune else ():
        if _is_needed(chosen[name], chosen.values()):
            continue
        without = flow_with(each for each in chosen if each != name)
        if not _is_worse(without, after):
            del chosen[name]
            after = without
    return ChosenCalls(tuple(chosen.values()), before, after)


def kept(model: nn.Module, names: Iterable[str]) -> nn.Module:
    """Return a copy of the module tree, with shared tensors, in which these calls are replaced."""
    step: Any = STEPS[_STEP].from_options({"calls": [*names]})
    tree = copy_tree(model)
    for name in list(step.targets(tree)):
        step.rewrite(tree, name)
    return tree


def _accepted(
    flow_with: Callable[[Iterable[str]], Flow],
    chosen: list[str],
    groups: list[list[CodeCall]],
    flow: Flow,
    *,
    strictly: bool,
) -> tuple[list[CodeCall], Flow]:
    """Return the calls with which the flow is not worse, and that flow: all of them, or group by group.

    With `strictly`, those with which it is better.
    """

    def is_fine(tried: Flow) -> bool:
        is_better = not strictly or cost_of(tried) < cost_of(flow)
        return is_better and not _is_worse(tried, flow)

    named = [call for group in groups for call in group]
    tried = flow_with([*chosen, *(call.name for call in named)])
    if is_fine(tried):
        return named, tried
    accepted: list[CodeCall] = []
    for group in groups if len(groups) > 1 else ():
        tried = flow_with([*chosen, *(call.name for call in (*accepted, *group))])
        if is_fine(tried):
            accepted += group
            flow = tried
    return accepted, flow


def _is_needed(call: CodeCall, chosen: Iterable[CodeCall]) -> bool:
    """Return whether a chosen `.contiguous()` is in the method of a `view`, whose branch may not have run."""
    return call.operator == "view" and any(
        other.operator == "contiguous" and group_of(other) == group_of(call) for other in chosen
    )


def _is_worse(flow: Flow, other: Flow) -> bool:
    """Return whether a flow has more copied bytes or breaks, or gives a custom kernel another layout."""
    given = {note for note in flow.notes if note.endswith(KERNEL_NOTE)}
    costs_more = any(map(gt, cost_of(flow), cost_of(other)))
    return flow.status != "ok" or costs_more or not given <= {*other.notes}


def cost_of(flow: Flow) -> tuple[int, int]:
    """Return the copied bytes and the breaks of a flow."""
    return flow.summary["copied_bytes"], flow.summary["breaks"]


def _calls_at_places(model: nn.Module, flow: Flow, seen: Container[str]) -> list[list[CodeCall]]:
    """Return groups of the calls that run the operators of the breaks and copies of a flow."""
    found: dict[str, CodeCall] = {}
    for place in _places(flow):
        calls = [*calls_of(model.get_submodule(place.module))]
        for call in _calls_of_place(model, place):
            group = (each for each in calls if group_of(each) == group_of(call))
            found.update((each.name, each) for each in group)
    return _grouped(found.values(), seen)


def calls_in_methods(
    model: nn.Module, flow: Flow, seen: Container[str], *, by_method: bool = False
) -> list[list[CodeCall]]:
    """Return groups of the calls, but for arithmetic, in the methods that have breaks and copies.

    For a copy in a module of torch these are the methods of the module that holds it. With `by_method` all
    calls of a method are one group.
    """
    found: dict[str, CodeCall] = {}
    for place in (*_places(flow), *flow.copies):
        calls = [
            each for each in calls_of(model.get_submodule(place.module)) if _is_in(place, each)
        ]
        holder = place.module.rpartition(".")[0]
        for call in calls or calls_of(model.get_submodule(holder)):
            if call.operator not in ("add", "mul"):
                found[call.name] = call
    key = _method_of if by_method else group_of
    return _grouped(found.values(), seen, key)


def _calls_of_place(model: nn.Module, place: Event | Copy) -> Iterator[CodeCall]:
    """Yield the calls that may be at the line of an event or a copy."""
    operator = place.operation.removeprefix("aten.")
    for call in find_calls(type(model.get_submodule(place.module))):
        runs = _RUNS.get(call.operator, (call.operator,))
        if _is_at(place, call.file, call.lines) and any(part in operator for part in runs):
            yield call


def group_of(call: CodeCall) -> Hashable:
    """Return a key of the calls to replace together: `.contiguous()` and the `view` that may need it."""
    return _method_of(call) if call.operator in ("contiguous", "view") else call.name


def _method_of(call: CodeCall) -> Hashable:
    return call.owner, call.method


def _places(flow: Flow) -> Iterator[Event | Copy]:
    for event in flow.events:
        if event.source:
            yield event
    yield from (copy for copy in flow.copies if copy.source)


def _is_in(place: Event | Copy, call: CodeCall) -> bool:
    """Return whether a break or copy is in the method of a call."""
    source = method_source(call.owner, call.method)
    assert source is not None  # the call was found in it
    assert source.tree is not None
    return _is_at(place, call.file, (source.tree.lineno, source.tree.end_lineno or 0))


def _is_at(place: Event | Copy, path: str, lines: tuple[int, int]) -> bool:
    file, _, line = place.source.rpartition(":")
    return bool(line) and lines[0] <= int(line) <= lines[1] and short_path(path) == file


def _grouped(
    calls: Iterable[CodeCall],
    seen: Container[str],
    key: Callable[[CodeCall], Hashable] = group_of,
) -> list[list[CodeCall]]:
    groups: dict[Hashable, list[CodeCall]] = {}
    for call in calls:
        if not call.obstacle and call.name not in seen:
            groups.setdefault(key(call), []).append(call)
    return list(groups.values())
