"""Make what a task writes beside the record: a contract, an artefact, a patch, a short script."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import nn

from prepare.core.forward.example_input import read_example
from prepare.core.model.deep_copy import deep_copy
from prepare.core.model.module_tree import copy_tree
from prepare.errors import ConfigError, PrepareError, RefusedError
from prepare.export.options import exporter_of
from prepare.steps import compile, keep_layout  # noqa: A004

if TYPE_CHECKING:
    from pathlib import Path

    from prepare.contract.records import ContractCheck
    from prepare.core.forward.example_input import Example
    from prepare.core.utils.progress import Stage
    from prepare.export.records import Export
    from prepare.job.settings import Settings
    from prepare.patch.records import Patch
    from prepare.pipeline import Pipeline
    from prepare.reduce.records import Reduction
    from prepare.verify.records import Verification


def reduction_of(
    settings: Settings, verification: Verification | None, given: Any
) -> Reduction | None:
    """Reduce the first module of the prepared model that is wrong by itself; None if none is.

    Raises:
        ConfigError: no example is declared.
    """
    if not given.example:
        remedy = "give one with input.shape=[...]"
        raise ConfigError("input", "task=reduce needs an example input", remedy)
    from prepare.reduce import reduce

    return reduce(
        given.model,
        given.example,
        pipeline=given.pipeline,
        culprit=verification.culprit if verification else "",
        training=settings.mode == "train",
        seconds=settings.verify_limits.seconds or 60.0,
    )


def check_exporter(settings: Settings) -> None:
    """Check, before the model is built, that the exporter can work here.

    Raises:
        ConfigError: no example is declared, or something that the exporter needs is missing.
    """
    problem = exporter_of(settings.export).missing()
    if problem is not None:
        raise ConfigError.of([problem])
    if not read_example(settings.input):
        remedy = "give one with input.shape=[...]"
        raise ConfigError("input", "task=export needs an example input", remedy)


def export_of(
    settings: Settings,
    pipeline: Pipeline,
    reference: nn.Module | str | None,
    model: nn.Module,
    example: Example | None,
    *,
    folder: Path,
    progress: Stage,
) -> Export:
    """Export the prepared model into the folder, and check the artefact.

    Raises:
        RefusedError: there is no unprepared model to compare with.
    """
    from prepare.export import export
    from prepare.job.time_prepared import BUDGET

    if isinstance(reference, str):
        raise RefusedError("export", f"there is no model to compare with: {reference}")
    timed = 0.0 if settings.bench == "none" else settings.bench_seconds or BUDGET[settings.bench]
    return export(
        deep_copy(model) if reference is None else reference,
        example,
        to=exporter_of(settings.export),
        folder=folder,
        pipeline=pipeline,
        prepared=model,
        budget=timed,
        progress=progress,
    )


def contract_of(
    settings: Settings,
    pipeline: Pipeline,
    reference: nn.Module | str | None,
    model: nn.Module,
    example: Example | None,
) -> ContractCheck:
    """Check the prepared model against its contract; with contract.update=true, write that.

    Raises:
        ConfigError: no example is declared, or the file is not a contract.
    """
    if not example:
        remedy = "give one with input.shape=[...]"
        raise ConfigError("input", "task=contract needs an example input", remedy)
    from prepare.contract.compare import compare
    from prepare.contract.observe import observe_contract
    from prepare.contract.records import Contract

    options = settings.contract
    try:
        known = None if options.update else Contract.load(options.file)
    except PrepareError as error:
        raise ConfigError.of(error.problems) from error
    today = observe_contract(
        model,
        example,
        mode=settings.mode,
        amp=settings.amp,
        pipeline=pipeline,
        reference=reference if isinstance(reference, nn.Module) else None,
        threads=known.threads if known else None,
        time=known.time is not None if known else options.time,
    )
    if known is None:
        today.save(options.file)
    return replace(compare(known or today, today), file=options.file)


def patch_of(
    settings: Settings,
    model: nn.Module,
    example: Example | None,
    verification: Verification | None,
) -> Patch:
    """Write the patch of a prepared model, and time the model with its calls against one without them."""
    from prepare.bench import compare
    from prepare.job.time_prepared import BUDGET
    from prepare.patch.choose_calls import choose_calls
    from prepare.patch.make_patch import make_patch

    train = settings.mode == "train"
    bare = copy_tree(model)
    compile.undo(bare)  # a compiled model calls the original
    patch = make_patch(bare, choose_calls(bare, example, backward=train, amp=settings.amp))
    if verification is not None:
        patch = replace(patch, verified=verification.status)
    if settings.bench == "none" or not patch.calls:
        return patch
    unpatched = deep_copy(model)
    keep_layout.undo(unpatched)
    budget = settings.bench_seconds or BUDGET[settings.bench]
    variants = {"as it is": unpatched, "patched": model}
    timed = compare(variants, example, train=train, budget=budget, settle=True, amp=settings.amp)
    row = timed.row("patched")
    return replace(patch, verdict=row.verdict, ratio=row.ratio, interval=row.ratio_interval)
