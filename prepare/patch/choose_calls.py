"""Choose the calls of the step keep_layout: those at the lines that the predicted layout flow names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from prepare.core.model.module_tree import copy_tree
from prepare.flow import predict
from prepare.flow.call_sites import short_path
from prepare.steps import keep_layout
from prepare.steps.keep_layout import KeepLayout
from prepare.steps.keeping.find_calls import CodeCall, find_calls
from prepare.steps.keeping.rewrite_class import original_class

if TYPE_CHECKING:
    from torch import nn

    from prepare.core.forward.autocast import Amp
    from prepare.flow.records import Event, Flow

# Mended lines may show breaks that others hid. Networks of the benchmarks need two or three rounds.
_ROUNDS = 8
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
    "view": ("view",),
    "add": ("add",),
    "mul": ("mul",),
    "empty_like": ("empty",),
    "zeros_like": ("zeros",),
    "ones_like": ("ones",),
}


@dataclass(frozen=True, slots=True)
class ChosenCalls:
    """The calls to replace, what each saves, and the flows without and with them.

    `saved` are the copied bytes and the breaks that come back if this call alone is not replaced.
    """

    calls: tuple[CodeCall, ...]
    saved: tuple[tuple[int, int], ...]
    before: Flow
    after: Flow

    @property
    def names(self) -> tuple[str, ...]:
        """The option `calls` of the step."""
        return tuple(call.name for call in self.calls)


def choose_calls(
    model: nn.Module, example: Any, *, backward: bool, amp: Amp = "none", prune: bool = True
) -> ChosenCalls:
    """Return the calls to replace in a model that is prepared but for this step; changes nothing.

    The calls at the lines of breaks are taken if the flow is not worse with them, until no other is named;
    then, with `prune`, each is dropped without which the flow is as good.
    """
    bare = copy_tree(model)  # shares the tensors, which predict does not change
    keep_layout.undo(bare)
    before = after = predict(bare, example, backward=backward, amp=amp)

    def flow_with(names: Iterable[str]) -> Flow:
        tree, wanted = kept(bare, names), before.wanted
        return predict(tree, example, backward=backward, wanted=wanted, amp=amp)

    chosen: dict[str, CodeCall] = {}
    refused: set[str] = set()
    for _ in range(_ROUNDS):
        named = {
            call.name: call
            for call in calls_at_breaks(bare, after)
            if not (call.obstacle or call.name in chosen or call.name in refused)
        }
        if not named or after.status != "ok":
            break
        accepted, after = _accepted(flow_with, list(chosen), list(named), after)
        refused.update(named.keys() - accepted)
        chosen.update((name, named[name]) for name in accepted)
    saved: dict[str, tuple[int, int]] = dict.fromkeys(chosen, (0, 0))
    for name in reversed(list(chosen)) if prune else ():
        without = flow_with(each for each in chosen if each != name)
        if _is_worse(without, after):
            (copied, breaks), (copied_less, breaks_less) = cost_of(without), cost_of(after)
            saved[name] = (copied - copied_less, breaks - breaks_less)
        else:
            del chosen[name]
            after = without
    return ChosenCalls(tuple(chosen.values()), tuple(saved[name] for name in chosen), before, after)


def calls_at_breaks(model: nn.Module, flow: Flow) -> list[CodeCall]:
    """Return the calls in the code of the model that run the operators at which the flow has breaks."""
    found: dict[str, CodeCall] = {}
    for event in flow.events:
        if event.kind == "break" and event.source:
            found.update((call.name, call) for call in calls_of_event(model, event))
    return list(found.values())


def calls_of_event(model: nn.Module, event: Event) -> Iterator[CodeCall]:
    """Yield the calls that may be at the line of an event."""
    file, _, line = event.source.rpartition(":")
    operator = event.operation.removeprefix("aten.")
    cls = original_class(type(model.get_submodule(event.module)))
    for call in find_calls(cls):
        first, last = call.lines
        is_there = first <= int(line) <= last and short_path(call.file) == file
        if is_there and any(part in operator for part in _RUNS[call.operator]):
            yield call


def kept(model: nn.Module, names: Iterable[str]) -> nn.Module:
    """Return a copy of the module tree, with shared tensors, in which these calls are replaced."""
    step, tree = KeepLayout(calls=tuple(names)), copy_tree(model)
    for name in list(step.targets(tree)):
        step.rewrite(tree, name)
    return tree


def _accepted(
    flow_with: Callable[[Iterable[str]], Flow], chosen: list[str], named: list[str], flow: Flow
) -> tuple[list[str], Flow]:
    """Return the calls with which the flow is not worse, and that flow: all of them, or one by one."""
    tried = flow_with([*chosen, *named])
    if not _is_worse(tried, flow):
        return named, tried
    accepted: list[str] = []
    for name in named if len(named) > 1 else ():
        tried = flow_with([*chosen, *accepted, name])
        if not _is_worse(tried, flow):
            accepted.append(name)
            flow = tried
    return accepted, flow


def _is_worse(flow: Flow, other: Flow) -> bool:
    return flow.status != "ok" or cost_of(flow) > cost_of(other)


def cost_of(flow: Flow) -> tuple[int, int]:
    """Return the copied bytes and the breaks of a flow, in forward and backward."""
    total, backward = flow.summary, flow.summary["backward"]
    return (
        total["copied_bytes"] + backward["copied_bytes"],
        total["breaks"] + backward["breaks"],
    )
