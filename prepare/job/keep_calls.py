"""Give the step keep_layout the calls that the layout flow of the example names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from prepare.core.model.deep_copy import CopyError, copy_or_build
from prepare.core.utils.text import plural, size
from prepare.errors import ConfigError
from prepare.job import analyses
from prepare.pipeline import Pipeline
from prepare.steps.keep_layout import KeepLayout

if TYPE_CHECKING:
    from torch import nn

    from prepare.core.forward.example_input import Example
    from prepare.job.settings import Settings


def steps_of(settings: Settings, example: Example | None) -> Mapping[str, Any]:
    """Return the steps of the job: task=patch adds keep_layout."""
    if settings.task != "patch":
        return settings.steps
    if not example:
        raise ConfigError(
            "input", "task=patch needs an example input", "give one with input.shape=[...]"
        )
    if not any(name.endswith("_memory_format") for name in settings.steps):
        remedy = "choose memfmt=channels_last, channels_last_3d or by_rank"
        raise ConfigError("memfmt", "task=patch needs a format that the code shall keep", remedy)
    return {"keep_layout": {}, **settings.steps}


def with_calls(
    settings: Settings,
    model: nn.Module,
    pipeline: Pipeline,
    example: Example | None,
    build: Callable[[], nn.Module],
) -> tuple[Pipeline, list[str]]:
    """Return the pipeline with the calls to replace in place of `auto`, and what a user should know.

    The rest of the pipeline is applied to a copy of the model, whose flow is predicted.
    """
    step = pipeline.steps.get(KeepLayout.name)
    if not isinstance(step, KeepLayout) or step.calls != "auto" or not example:
        return pipeline, []
    where = f"steps.{step.name}.calls"
    if (held := analyses.bytes_of(model)) > analyses.LARGEST:
        reason = f"the model holds {size(held)}, too much to copy it"
        return pipeline, [f"{where}: auto takes all calls of operators: {reason}"]
    from prepare.patch.choose_calls import choose_calls

    config = pipeline.to_config()
    others = Pipeline.from_config(
        {name: options for name, options in config.items() if name not in (step.name, "compile")}
    )
    try:
        copied = copy_or_build(model, build)
    except CopyError as error:
        return pipeline, [f"{where}: auto takes all calls of operators: {error}"]
    prepared = others.apply(copied, strict=False, known_issues="ignore")
    choice = choose_calls(
        prepared,
        analyses.formatted(example, others),
        backward=settings.mode == "train",
        amp=settings.amp,
    )
    if choice.before.status != "ok":
        reason = f"the flow cannot be predicted: {choice.before.reason}"
        return pipeline, [f"{where}: auto takes all calls of operators: {reason}"]
    config[step.name] = {**config[step.name], "calls": list(choice.names)}
    notes = []
    if not choice.names:
        breaks = choice.before.summary["breaks"]
        why = (
            f"none of {plural(breaks, 'break')} can be removed"
            if breaks
            else "nothing loses the layout"
        )
        notes.append(f"{where}: no call of the model's own code is replaced: {why}")
    return Pipeline.from_config(config), notes
