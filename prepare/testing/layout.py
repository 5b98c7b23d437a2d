"""A test of one line for your own network: its activations keep the layout that its weights ask for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

from prepare.core.model.module_tree import clone_of, copy_tree
from prepare.core.utils.text import size
from prepare.pipeline import Pipeline
from prepare.stages.flow import predict
from prepare.stages.flow.document import layout_remedy, why_not_kept
from prepare.stages.flow.find_remedy import find_remedy

if TYPE_CHECKING:
    from torch import nn

    from prepare.stages.flow.records import Copy, Event, Flow

__all__ = ["assert_layout"]

_NO_STEP = "no step keeps the layout there; change the code"


def assert_layout(model: nn.Module, batch: Any, *, pipeline: Pipeline | None = None) -> None:
    """Check that one call of `model` loses its layout nowhere; nothing is computed, nothing is changed.

    The layout is the one that most of the model's convolution weights are in. So a model that no step has
    converted fails too: it can lose nothing.

    Args:
        model: in training or evaluation mode.
        batch: a tensor, a tuple of positional or a mapping of named arguments, or an Example.
        pipeline: its steps, without `compile`, are applied to a copy of the model first, and the batch is
            formatted as it does; on a model that is prepared already the steps find nothing to do. The step
            `device` says for which device to predict: `cuda` need not be here.

    Raises:
        AssertionError: with one line for each loss, as `forward: clone (my_package/nets.py:8) copies
            512.0 KiB`, and the steps that keep the layout; or with the reason why nothing is known, as a
            forward that needs values.
        PrepareError: the pipeline cannot be applied to this model.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)).eval()
        >>> pipeline = Pipeline.from_config({"conv2d_memory_format": {}})
        >>> assert_layout(model, torch.randn(1, 3, 8, 8), pipeline=pipeline)
    """
    __tracebackhide__ = True  # pytest then shows the line of the test
    device, steps = None, []
    if pipeline is not None:
        device = getattr(pipeline.steps.get("device"), "device", None)
        steps = [s for s in pipeline.steps.values() if s.phase != "runtime" and s.name != "device"]
    if steps:
        applied, model = Pipeline(steps), copy_tree(model, cache(clone_of))
        applied.apply(model, strict=False, example=batch, known_issues="ignore")
        batch = applied.format(batch)
    flow = predict(model, batch, device=device)
    if why := why_not_kept(flow):
        losses = [*_losses(flow)]
        if losses and flow.status == "ok":
            present = () if pipeline is None else pipeline.steps
            remedy = find_remedy(model, batch, flow, present)
            why = layout_remedy(replace(flow, remedy=remedy)) or _NO_STEP
        raise AssertionError("\n".join([*losses, why]))


def _losses(flow: Flow) -> Iterator[str]:
    """Yield a line for each place where the layout is lost, with what all calls of it copy."""
    lost: dict[tuple[str, ...], list[Event]] = {}
    for event in flow.events:
        lost.setdefault(_at(event), []).append(event)
    for at, events in lost.items():
        first, count = events[0], sum(event.count for event in events)
        place = first.source or f"module {first.module or first.type}"
        copied = sum(copy.bytes for copy in flow.copies if _at(copy) == at)
        # Some operations copy nothing, and only give another layout.
        other = f"gives {size(sum(event.bytes for event in events))} another layout"
        cost = f"copies {size(copied)}" if copied else other
        times = f" in {count:,} calls" if count > 1 else ""
        yield f"forward: {first.cause} ({place}) {cost}{times}"


def _at(found: Event | Copy) -> tuple[str, ...]:
    return found.module, found.operation, found.source
