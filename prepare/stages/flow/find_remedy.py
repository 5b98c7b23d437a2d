"""Find the steps that would remove breaks from a layout flow, by predicting the flow with each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from prepare.core.model.module_tree import clone_of, copy_tree
from prepare.errors import PrepareError
from prepare.pipeline import Pipeline
from prepare.stages.flow.follow import predict
from prepare.stages.flow.records import Flow, Remedy
from prepare.steps.keeping.choose_calls import choose_calls, cost_of, kept

if TYPE_CHECKING:
    from torch import nn

    from prepare.core.forward.torch_state import Amp

# The formats of the step for each rank; the other steps keep the formats that a pipeline has.
_FORMATS = {
    "conv2d_memory_format": {4: "channels_last"},
    "conv3d_memory_format": {5: "channels_last_3d"},
}
_STEPS = ("repair_layout", "keep_layout", *_FORMATS)


class _Attempt(NamedTuple):
    """A model with one more step, and its flow."""

    step: str
    model: nn.Module
    flow: Flow

    @property
    def breaks(self) -> int:
        return cost_of(self.flow)[1]


def find_remedy(
    model: nn.Module,
    example: Any,
    flow: Flow,
    present: Iterable[str],
    amp: Amp = "none",
) -> Remedy | None:
    """Return the steps beside those `present` that remove breaks from the flow of a model; None if none does.

    The best one is added until no other removes a break. `model` is not changed.
    """
    added: list[str] = []
    missing = [name for name in _STEPS if name not in set(present)]
    best = _Attempt("", model, flow)
    while missing and best.breaks:
        attempts = [each for name in missing if (each := _attempt(best, name, example, amp))]
        if "keep_layout" in added:
            # Another step may uncover calls, or make some needless.
            anew = [(each, _attempt(each, "keep_layout", example, amp)) for each in attempts]
            attempts += [calls._replace(step=each.step) for each, calls in anew if calls]
        better = [each for each in attempts if each.breaks < best.breaks]
        if not better:
            break
        best = min(better, key=lambda each: each.breaks)
        added.append(best.step)
        missing.remove(best.step)
    if not added:
        return None
    copied, breaks = cost_of(best.flow)
    return Remedy(steps=tuple(added), breaks=breaks, copied_bytes=copied)


def _attempt(before: _Attempt, step: str, example: Any, amp: Amp) -> _Attempt | None:
    """Return the model with this step and its flow; None if the step changes nothing there."""
    if step == "keep_layout":
        chosen = choose_calls(before.model, example, amp=amp)
        return _Attempt(step, kept(before.model, chosen.names), chosen.after)
    wanted: Mapping[int, str] = _FORMATS.get(step, {})
    is_wanted = any(before.flow.wanted.get(rank) == name for rank, name in wanted.items())
    # With all convolutions contiguous, no layout was asked for.
    if is_wanted or set(before.flow.wanted.values()) == {"contiguous"}:
        return None
    tree = copy_tree(before.model, clone_of if wanted else lambda tensor: tensor)
    pipeline = Pipeline.from_config({step: {}})
    try:
        if not pipeline.plan(tree, known_issues="ignore"):
            return None
        pipeline.apply(tree, known_issues="ignore")
    except PrepareError:
        return None
    both = {**before.flow.wanted, **wanted}
    flow = predict(tree, example, wanted=both, amp=amp)
    return _Attempt(step, tree, flow) if flow.status == "ok" else None
