"""Collect the calls of a model, and reduce the first that fails."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from prepare.core.forward.explain_error import explained
from prepare.core.utils.environment import environment
from prepare.reduce.calls import collect_calls
from prepare.reduce.search import WorkerTrials, reduce_calls, trial_here

if TYPE_CHECKING:
    from torch import nn

    from prepare.pipeline import Pipeline
    from prepare.reduce.records import Reduction


def reduce_model(
    model: nn.Module,
    batch: Any,
    *,
    pipeline: Pipeline | None,
    culprit: str,
    slow: bool,
    training: bool,
    seconds: float,
    isolated: bool,
) -> Reduction | None:
    """Reduce the first call of `model` that fails; see `prepare.reduce.reduce`."""
    try:
        calls = collect_calls(model, batch, pipeline=pipeline, training=training)
    except Exception as error:  # the model's own code
        raise explained(model, error) from error
    if slow:
        calls = [replace(call, slow=True) for call in calls if call.format != "contiguous"]
    calls.sort(key=lambda call: call.name != culprit)  # the others keep their order
    if not isolated:
        return reduce_calls(calls, trial_here, seconds=seconds, environment=environment())
    with WorkerTrials() as trial:
        return reduce_calls(calls, trial, seconds=seconds, environment=environment())
