"""Choose the calls of the step keep_layout: those that give another layout than torch, if the flow gains."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from operator import gt
from typing import TYPE_CHECKING, Any

from prepare.core.model.module_tree import copy_tree
from prepare.registry import STEPS
from prepare.stages.flow import predict
from prepare.stages.flow.operator_watcher import KERNEL_NOTE
from prepare.steps.keeping import operators
from prepare.steps.keeping.calls import SAFE, CodeCall, calls_of
from prepare.steps.keeping.operators import recording

if TYPE_CHECKING:
    from torch import nn

    from prepare.core.forward.torch_state import Amp
    from prepare.stages.flow.records import Flow

_STEP = "keep_layout"


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
        with recording() as seen:
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
    given = {note for note in flow.notes if note.endswith(KERNEL_NOTE)}
    costs_more = any(map(gt, cost_of(flow), cost_of(other)))
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
