"""What a run looks at beside the audit: the layout flow, whether the answers are right, and the time."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from prepare.core.forward.example_input import build_example
from prepare.core.model.module_tree import copy_tree
from prepare.core.utils.text import first_line, size
from prepare.errors import ConfigError
from prepare.steps import compile, repair_layout  # noqa: A004
from prepare.steps.input_format import InputFormat

if TYPE_CHECKING:
    from torch import nn

    from prepare.bench.records import Bench
    from prepare.core.forward.example_input import Example
    from prepare.core.utils.progress import Stage
    from prepare.flow.records import Flow
    from prepare.job.settings import Settings
    from prepare.pipeline import Pipeline
    from prepare.tune.records import Tuning
    from prepare.verify.records import Verification

# A model of more bytes is not copied for the sake of looks that nobody asked for.
_LARGEST = 1 << 30


def example_of(settings: Settings) -> Example | None:
    """The example as it is given; None where none is."""
    return build_example(settings.input, settings.seed) or None


def tuning_of(settings: Settings, model: nn.Module, progress: Stage) -> Tuning:
    """The fastest recipe for this model and example; what was declared is one more candidate.

    Raises:
        ConfigError: there is no example.
    """
    given = example_of(settings)
    if not given:
        remedy = "give one with input.shape=[...]"
        raise ConfigError("input", "task=tune needs an example input", remedy)
    from prepare.tune import tune

    return tune(
        model,
        given,
        allow=settings.tune.allow,
        mode=settings.mode,
        budget=settings.tune.budget,
        declared=settings.steps,
        cache=settings.tune.cache,
        seed=settings.seed,
        progress=progress,
    )


def formatted(example: Example, pipeline: Pipeline) -> Example:
    """The example, formatted as the pipeline's steps say, whether one of them is for inputs or not."""
    steps = pipeline.steps.values()
    formats = next((s for s in steps if isinstance(s, InputFormat)), InputFormat()).bind(steps)
    return replace(
        example, args=formats.format(example.args), kwargs=formats.format(example.kwargs)
    )


def flow_of(settings: Settings, model: nn.Module, example: Example | None) -> Flow | None:
    """Where the model loses the layout; None where nobody asks, or there is nothing to call it with."""
    if settings.flow == "none" or not example:
        return None
    from prepare import flow

    look = flow.predict if settings.flow == "predict" else flow.observe
    return look(model, example, backward=settings.mode == "train")


def flow_without_repairs(
    pipeline: Pipeline, model: nn.Module, example: Example | None
) -> Flow | None:
    """Where it would lose the layout without its repairs; None where there are none."""
    if not example or "repair_layout" not in pipeline.steps:
        return None
    from prepare.flow import predict

    bare = copy_tree(model)  # shares the tensors, which predict does not write into
    repair_layout.undo(bare)
    compile.undo(bare)  # what is compiled calls the original
    return predict(bare, example, backward=model.training)


def reference_of(settings: Settings, model: nn.Module) -> nn.Module | str | None:
    """A copy of the unprepared model, or why there is none; None where nothing is compared with it."""
    if {settings.verify, settings.bench} == {"none"}:
        return None
    if not is_copied(settings, model):
        wrong = f"the model holds {size(_bytes(model))}, and is not copied for it"
        return f"{wrong}; verify=full or bench=full does so"
    if any(tensor.is_meta for tensor in model.parameters()):
        return "a model on the meta device holds no numbers"
    try:
        return copy.deepcopy(model)
    except (
        Exception
    ) as error:  # the model's own code, or torch's: weight_norm of old, graphs, handles
        return f"the model cannot be copied: {type(error).__name__}: {first_line(error)}"


def is_copied(settings: Settings, model: nn.Module) -> bool:
    """Whether anything that was asked for compares the prepared model with a copy from before."""
    levels = {settings.verify, settings.bench}
    return "full" in levels or (levels != {"none"} and _bytes(model) <= _LARGEST)


def verification_of(
    settings: Settings,
    pipeline: Pipeline,
    reference: nn.Module | str | None,
    model: nn.Module,
    example: Example | None,
) -> Verification | None:
    """Whether the prepared model computes what its reference does; None where nobody asks."""
    if settings.verify == "none" or reference is None or not example:
        return None
    if isinstance(reference, str):
        from prepare.verify.records import unknown

        return unknown(reference, level=settings.verify, mode=settings.mode)
    from prepare.verify import verify

    return verify(
        reference, model, example, level=settings.verify, pipeline=pipeline, mode=settings.mode
    )


def bench_of(
    settings: Settings,
    pipeline: Pipeline,
    reference: nn.Module | str | None,
    model: nn.Module,
    example: Example | None,
    *,
    took: float,
    tell: Callable[[str], object] | None,
) -> Bench | None:
    """How fast the prepared model is beside its reference; None where nobody asks.

    `took` are the seconds of its first forward. The reference is moved to the wanted device.
    """
    if settings.bench == "none" or reference is None:
        return None
    from prepare.job.time_prepared import Models, time_models

    return time_models(
        Models(unprepared=reference, prepared=model, pipeline=pipeline),
        example,
        level=settings.bench,
        mode=settings.mode,
        took=took,
        tell=tell or (lambda _: None),
    )


def _bytes(model: nn.Module) -> int:
    return sum(t.nbytes for each in (model.parameters(), model.buffers()) for t in each)
