"""Find the steps that would remove breaks from a layout flow, by predicting the flow with each."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from prepare.core.model.module_tree import clone_of, copy_tree
from prepare.errors import PrepareError
from prepare.pipeline import Pipeline
from prepare.stages.flow.follow import predict
from prepare.stages.flow.records import Flow, Remedy

if TYPE_CHECKING:
    from torch import nn

    from prepare.core.forward.torch_state import Amp

# The formats of the step for each rank; the other steps keep the formats that a pipeline has.
_FORMATS = {
    "conv2d_memory_format": {4: "channels_last"},
    "conv3d_memory_format": {5: "channels_last_3d"},
}
_STEPS = ("repair_layout", "keep_layout", *_FORMATS)


def find_remedy(
    model: nn.Module, example: Any, flow: Flow, present: Iterable[str], amp: Amp = "none"
) -> Remedy | None:
    """Return the steps beside those `present` that remove breaks from the flow of a model; None if none does.

    The best one is added until no other removes a break. `model` is not changed.
    """
    added: list[str] = []
    best, missing = flow, [name for name in _STEPS if name not in set(present)]
    chosen = "none yet"
    while chosen and best.summary["breaks"]:
        chosen = ""
        for name in missing:
            found = _flow_with([*added, name], model, example, flow, amp)
            if found and found.summary["breaks"] < best.summary["breaks"]:
                best, chosen = found, name
            if not best.summary["breaks"]:
                break  # no other step removes more
        added += filter(None, [chosen])
        missing = [name for name in missing if name != chosen]
    if not added:
        return None
    breaks, copied = best.summary["breaks"], best.summary["copied_bytes"]
    return Remedy(steps=tuple(added), breaks=breaks, copied_bytes=copied)


def _flow_with(
    steps: list[str], model: nn.Module, example: Any, flow: Flow, amp: Amp
) -> Flow | None:
    """Return the flow of a copy with these steps; None if the last of them changes nothing there."""
    wanted = {rank: name for step in steps for rank, name in _FORMATS.get(step, {}).items()}
    own = _FORMATS.get(steps[-1], {})
    # With all convolutions contiguous, no layout was asked for.
    is_wanted = any(flow.wanted.get(rank) == name for rank, name in own.items())
    if is_wanted or set(flow.wanted.values()) == {"contiguous"}:
        return None
    tree = copy_tree(model, clone_of if wanted else lambda tensor: tensor)
    pipeline, last = (Pipeline.from_config({key: {} for key in s}) for s in (steps, steps[-1:]))
    try:
        # What keep_layout replaces depends on the example, which a plan does not have.
        if steps[-1] != "keep_layout" and not last.plan(tree, known_issues="ignore"):
            return None
        pipeline.apply(tree, example=example, amp=amp, known_issues="ignore")
    except PrepareError:
        return None
    found = predict(tree, example, wanted={**flow.wanted, **wanted}, amp=amp)
    return found if found.status == "ok" else None
