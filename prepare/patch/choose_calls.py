"""Choose the calls of the step keep_layout: those at the lines that the predicted layout flow names."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from prepare.core.model.module_tree import copy_tree
from prepare.flow import predict
from prepare.flow.call_sites import short_path
from prepare.flow.operator_watcher import KERNEL_NOTE
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
        groups: dict[Hashable, list[str]] = {}
        for name, call in named.items():
            groups.setdefault(_group(call), []).append(name)
        accepted, after = _accepted(flow_with, list(chosen), list(groups.values()), after)
        refused.update(named.keys() - accepted)
        chosen.update((name, named[name]) for name in accepted)
    saved: dict[str, tuple[int, int]] = dict.fromkeys(chosen, (0, 0))
    backwards = list(chosen)[::-1]
    views_last = sorted(backwards, key=lambda name: chosen[name].operator == "view")
    for name in views_last if prune else ():
        if _is_needed(chosen[name], chosen.values()):
            continue
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
            cls = original_class(type(model.get_submodule(event.module)))
            for call in calls_of_event(model, event):
                group = (each for each in find_calls(cls) if _group(each) == _group(call))
                found.update((each.name, each) for each in group)
    return list(found.values())


def _group(call: CodeCall) -> Hashable:
    """Return a key of the calls to replace together: `.contiguous()` and the `view` that may need it."""
    is_pair = call.operator in ("contiguous", "view")
    return (call.owner, call.method) if is_pair else call.name


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
    flow_with: Callable[[Iterable[str]], Flow],
    chosen: list[str],
    groups: list[list[str]],
    flow: Flow,
) -> tuple[list[str], Flow]:
    """Return the calls with which the flow is not worse, and that flow: all of them, or group by group."""
    named = [name for group in groups for name in group]
    tried = flow_with([*chosen, *named])
    if not _is_worse(tried, flow):
        return named, tried
    accepted: list[str] = []
    for group in groups if len(groups) > 1 else ():
        tried = flow_with([*chosen, *accepted, *group])
        if not _is_worse(tried, flow):
            accepted += group
            flow = tried
    return accepted, flow


def _is_needed(call: CodeCall, chosen: Iterable[CodeCall]) -> bool:
    """Return whether a chosen `.contiguous()` is in the method of a `view`, whose branch may not have run."""
    return call.operator == "view" and any(
        other.operator == "contiguous" and _group(other) == _group(call) for other in chosen
    )


def _is_worse(flow: Flow, other: Flow) -> bool:
    """Return whether a flow costs more, or gives a custom kernel a layout that the other does not."""
    given = {note for note in flow.notes if note.endswith(KERNEL_NOTE)}
    return flow.status != "ok" or cost_of(flow) > cost_of(other) or not given <= {*other.notes}


def cost_of(flow: Flow) -> tuple[int, int]:
    """Return the copied bytes and the breaks of a flow, in forward and backward."""
    total, backward = flow.summary, flow.summary["backward"]
    return (
        total["copied_bytes"] + backward["copied_bytes"],
        total["breaks"] + backward["breaks"],
    )
