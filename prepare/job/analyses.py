"""Run the analyses of a job: layout flow, verification, timing and tuning."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from prepare.core.forward.compile_cache import CacheCounts, compile_cache
from prepare.core.forward.example_input import build_example
from prepare.core.model.deep_copy import CopyError, copy_or_build
from prepare.core.model.module_tree import copy_tree
from prepare.core.utils.text import size
from prepare.errors import ConfigError
from prepare.job.model_target import locate_named
from prepare.steps import compile, keep_layout, repair_layout  # noqa: A004
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

# A larger model, in bytes, is not copied for the default analyses.
LARGEST = 1 << 30


def example_of(settings: Settings) -> Example | None:
    """Build the example input; None if none is declared."""
    return build_example(settings.input, settings.seed) or None


def metric_of(settings: Settings) -> Callable[[nn.Module, Any], float] | None:
    """Return the function that `verify.metric` names.

    Raises:
        ConfigError: it does not exist.
        ModelError: importing its module raised.
    """
    name = settings.verify_limits.metric
    return None if name is None else locate_named(name, "verify.metric")


def kept_compilations(settings: Settings) -> AbstractContextManager[CacheCounts | None]:
    """Return a context in which torch compiles into the folder `compile.save`, and counts what it reads.

    Raises:
        FileError: the folder cannot be made.
    """
    folder = settings.compile.save
    return nullcontext() if folder is None else compile_cache(folder)


def tuning_of(
    settings: Settings,
    model: nn.Module,
    progress: Stage,
    build: Callable[[], nn.Module],
    pipeline: Pipeline,
) -> Tuning:
    """Find the fastest recipe for this model and example; the declared pipeline is one more candidate.

    Raises:
        ConfigError: no example is declared.
    """
    example = example_of(settings)
    if not example:
        remedy = "give one with input.shape=[...]"
        raise ConfigError("input", "task=tune needs an example input", remedy)
    from prepare.tune import tune

    return tune(
        model,
        example,
        allow=settings.tune.allow,
        mode=settings.mode,
        amp=settings.amp,
        budget=settings.tune.budget,
        declared={**settings.steps, **_calls_of(pipeline)},
        cache=settings.tune.cache,
        metric=metric_of(settings),
        max_drop=settings.verify_limits.max_drop,
        max_memory=settings.tune.max_memory,
        calls=settings.tune.calls,
        seed=settings.seed,
        progress=progress,
        build=build,
    )


def formatted(example: Example, pipeline: Pipeline) -> Example:
    """Format the example for the pipeline, which need not have an input step."""
    steps = pipeline.steps.values()
    formats = next((s for s in steps if isinstance(s, InputFormat)), InputFormat()).bind(steps)
    return replace(
        example, args=formats.format(example.args), kwargs=formats.format(example.kwargs)
    )


def is_same(example: Example, formatted: Example | None) -> bool:
    """Return whether formatting the example changed nothing: it then returns the same objects."""
    return (
        formatted is not None
        and formatted.args is example.args
        and formatted.kwargs is example.kwargs
    )


def flow_of(settings: Settings, model: nn.Module, example: Example | None) -> Flow | None:
    """Compute the layout flow of the model; None with flow=none, or without an example."""
    if settings.flow == "none" or not example:
        return None
    from prepare import flow

    follow = flow.predict if settings.flow == "predict" else flow.observe
    return follow(model, example, backward=settings.mode == "train", amp=settings.amp)


def with_remedy(
    settings: Settings,
    pipeline: Pipeline,
    model: nn.Module,
    example: Example | None,
    flow: Flow | None,
) -> Flow | None:
    """Return the flow of a prepared model with the steps that would remove breaks from it, if any would."""
    if flow is None or flow.status != "ok":
        return flow
    from prepare.patch.advise import find_remedy

    bare = copy_tree(model)
    compile.undo(bare)  # a compiled model calls the original
    backward = settings.mode == "train"
    remedy = find_remedy(bare, example, flow, pipeline.steps, backward=backward, amp=settings.amp)
    return replace(flow, remedy=remedy)


def flow_without_repairs(
    settings: Settings, pipeline: Pipeline, model: nn.Module, example: Example | None
) -> Flow | None:
    """Predict the layout flow without repairs and rewritten calls; None if the pipeline has neither."""
    if not example or {"repair_layout", "keep_layout"}.isdisjoint(pipeline.steps):
        return None
    from prepare.flow import predict

    bare = copy_tree(model)  # shares the tensors, which predict does not change
    keep_layout.undo(bare)
    repair_layout.undo(bare)
    compile.undo(bare)  # a compiled model calls the original
    return predict(bare, example, backward=model.training, amp=settings.amp)


def reference_of(
    settings: Settings, model: nn.Module, build: Callable[[], nn.Module]
) -> nn.Module | str | None:
    """Copy the unprepared model, or build it again if it cannot be copied.

    Return the reason if there is no second model, None if none is needed.
    """
    if settings.task != "export" and {settings.verify, settings.bench} == {"none"}:
        return None
    if not is_copied(settings, model):
        wrong = f"the model holds {size(bytes_of(model))}, too much to copy it by default"
        return f"{wrong}; verify=full or bench=full copies it"
    if any(tensor.is_meta for tensor in model.parameters()):
        return "a model on the meta device holds no data"
    try:
        return copy_or_build(model, build)
    except CopyError as error:
        remedy = "let its code draw all numbers from torch's generator, which seed= sets"
        return f"the model cannot be copied, and {error}; {remedy}"


def is_copied(settings: Settings, model: nn.Module) -> bool:
    """Return whether the job compares the prepared model with a copy of the unprepared one."""
    levels = {settings.verify, settings.bench}
    if settings.task == "export":
        return True
    return "full" in levels or (levels != {"none"} and bytes_of(model) <= LARGEST)


def verification_of(
    settings: Settings,
    pipeline: Pipeline,
    reference: nn.Module | str | None,
    model: nn.Module,
    example: Example | None,
) -> Verification | None:
    """Verify the prepared model against its reference; None with verify=none, or without an example."""
    if settings.verify == "none" or reference is None or not example:
        return None
    if isinstance(reference, str):
        from prepare.verify.records import unknown

        return unknown(reference, level=settings.verify, mode=settings.mode)
    from prepare.verify import verify

    return verify(
        reference,
        model,
        example,
        level=settings.verify,
        pipeline=pipeline,
        mode=settings.mode,
        seconds=settings.verify_limits.seconds,
        memory=settings.verify_limits.memory,
        amp=settings.amp,
        metric=metric_of(settings),
        max_drop=settings.verify_limits.max_drop,
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
    """Time the prepared model against its reference; None with bench=none.

    `took` is the time in seconds of a forward of the prepared model. The reference is moved to the
    device of the pipeline.
    """
    if settings.bench == "none" or reference is None:
        return None
    from prepare.job.time_prepared import Models, time_models

    if isinstance(reference, str) and settings.verify != "none":
        reference = "there is no second model, see above"
    return time_models(
        Models(unprepared=reference, prepared=model, pipeline=pipeline),
        example,
        level=settings.bench,
        mode=settings.mode,
        took=took,
        seconds=settings.bench_seconds,
        amp=settings.amp,
        tell=tell or (lambda _: None),
    )


def bytes_of(model: nn.Module) -> int:
    """Return the size of a model's parameters and buffers."""
    return sum(t.nbytes for each in (model.parameters(), model.buffers()) for t in each)


def _calls_of(pipeline: Pipeline) -> dict[str, Any]:
    """Return the step keep_layout with its calls, if the pipeline has it."""
    step = pipeline.steps.get("keep_layout")
    return {"keep_layout": step.to_options()} if step else {}
