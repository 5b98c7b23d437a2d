"""Load and save the weights of a job, if possible straight into the prepared layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prepare import checkpoint
from prepare.checkpoint.init_empty import build_empty
from prepare.checkpoint.load_checkpoint import fill_model
from prepare.checkpoint.open_weights import open_weights
from prepare.checkpoint.paths import beside
from prepare.job.build_model import build_model
from prepare.pipeline import Pipeline
from prepare.registry import tasks
from prepare.stage import Stage

if TYPE_CHECKING:
    from torch import nn

    from prepare.core.utils.progress import Stage as Progress
    from prepare.job.settings import Settings
    from prepare.plan import Plan, State

# A larger model, in bytes, is not copied for a stage that does not insist.
LARGEST = 1 << 30


def model_of(
    settings: Settings, build: Callable[[Mapping[str, Any]], Any], stages: list[Stage]
) -> nn.Module:
    """Build the model of a job and load the file that `weights` names.

    If nothing needs the unprepared values, the parameters stay on meta until `read_into`.
    """
    if settings.weights is None:
        return build_model(settings, build)
    model = build_empty(lambda: build_model(settings, build))
    if not _is_left_empty(settings, model, stages):
        _read(settings, model, Pipeline([]))
    return model


def read_into(
    settings: Settings, model: nn.Module, pipeline: Pipeline, stages: list[Stage]
) -> None:
    """Load the weights that `model_of` has not loaded, each tensor as `pipeline` wants it."""
    if settings.weights is not None and _is_left_empty(settings, model, stages):
        _read(settings, model, pipeline)


def plan_of(settings: Settings, model: nn.Module, pipeline: Pipeline) -> Plan:
    """Plan for a model whose weights may not be loaded yet, as if they were on the CPU."""
    plan = pipeline.plan(model, known_issues=settings.known_issues, amp=settings.amp)
    if settings.weights is None:
        return plan
    tensors = [t._replace(old=_on_cpu(t.old), new=_on_cpu(t.new)) for t in plan.tensors]
    return replace(plan, tensors=tensors)


def save(settings: Settings, model: nn.Module, pipeline: Pipeline, stage: Progress) -> list[str]:
    """Save the prepared model if `save` names a file; return notes on the weights read and written."""
    notes = [f"weights: those of {settings.weights}"] if settings.weights else []
    if settings.save:
        with stage("saving the weights"):
            # Of what the file beside it can hold: the notes say what is left out.
            recorded = Pipeline.from_config(pipeline.to_recipe())
            checkpoint.save(model, settings.save, pipeline=recorded)
        notes.append(
            f"weights: written to {settings.save}, with {beside(Path(settings.save)).name}"
        )
    return notes


def is_copied(model: nn.Module, stages: list[Stage]) -> bool:
    """Return whether the stages compare the prepared model with a copy of the unprepared one."""
    wanted = {stage.copies() for stage in stages}
    return "always" in wanted or ("small" in wanted and bytes_of(model) <= LARGEST)


def bytes_of(model: nn.Module) -> int:
    """Return the size of a model's parameters and buffers."""
    return sum(t.nbytes for each in (model.parameters(), model.buffers()) for t in each)


def _is_left_empty(settings: Settings, model: nn.Module, stages: list[Stage]) -> bool:
    """Return whether nothing needs the unprepared values, and the target device is known."""
    chooses = any(type(stage).choose is not Stage.choose for stage in stages)
    named = settings.steps.get("device") is not None
    prepares = tasks()[settings.task].prepares
    return named and prepares and not chooses and not is_copied(model, stages)


def _read(settings: Settings, model: nn.Module, pipeline: Pipeline) -> None:
    fill_model(model, open_weights(Path(settings.weights or "")), pipeline)


def _on_cpu(state: State) -> State:
    return state._replace(device="cpu") if state.device == "meta" else state
