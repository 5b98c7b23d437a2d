"""Compare the prepared model of a job with the unprepared one, in the way that its task names."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from prepare.core.utils.progress import stage_if

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

    from prepare.core.forward.example_input import Example
    from prepare.core.utils.progress import Stage
    from prepare.job.results import Results, Show
    from prepare.job.settings import Settings
    from prepare.pipeline import Pipeline


class Compared(NamedTuple):
    """A prepared model, its pipeline, its reference or the reason why there is none, and the example."""

    pipeline: Pipeline
    reference: nn.Module | str | None
    model: nn.Module
    example: Example | None


def with_comparison(
    settings: Settings,
    results: Results,
    given: Compared,
    stage: Stage,
    show: Show,
    *,
    took: float,
) -> Results:
    """Return the results with the verification and the timing against the unprepared model."""
    from prepare.job import analyses

    example = given.example
    try:
        with stage_if(
            settings.verify != "none" and example, stage, "verifying outputs and gradients"
        ):
            verification = analyses.verification_of(settings, *given)
        results = replace(results, verification=verification)
        show(results)
        if settings.task == "reduce":
            return with_reduction(settings, results, given, stage)
        text = "timing it against the unprepared model"
        with stage_if(settings.bench != "none" and example, stage, text) as tell:
            bench = analyses.bench_of(settings, *given, took=took, tell=tell)
    except KeyboardInterrupt as stop:
        # What was done until now is worth its record.
        missing = "verification and timing" if results.verification is None else "timing"
        stopped = f"{str(stop) or 'stopped by Ctrl-C'}; not done: {missing}"
        return replace(results, stopped=stopped)
    return replace(results, bench=bench)


def with_reduction(settings: Settings, results: Results, given: Compared, stage: Stage) -> Results:
    """Return the results with the script of the first module that is wrong by itself, or a note."""
    from prepare.job import artefacts

    with stage("reducing the first wrong module to a script"):
        reduction = artefacts.reduction_of(settings, results.verification, given)
    if reduction is None:
        text = "no module of torch is wrong by itself on inputs of this size, mean and deviation"
        return replace(results, notes=[*results.notes, text])
    return replace(results, reduction=reduction)


def with_contract(settings: Settings, results: Results, given: Compared, stage: Stage) -> Results:
    """Return the results with the check of the contract, or with a note that it was written."""
    from prepare.job import artefacts

    with stage("checking the layout contract"):
        contract = artefacts.contract_of(settings, *given)
    if settings.contract.update:
        text = f"the contract is written to {settings.contract.file}"
        return replace(results, notes=[*results.notes, text])
    return replace(results, contract=contract)


def with_export(
    settings: Settings,
    results: Results,
    given: Compared,
    stage: Stage,
    show: Show,
    *,
    folder: Path,
) -> Results:
    """Return the results with the verification and, unless that failed, with the export."""
    from prepare.job import artefacts

    # The artefact is timed together with both models.
    untimed = replace(settings, bench="none")
    results = with_comparison(untimed, results, given, stage, show, took=0.0)
    verification = results.verification
    if results.stopped or (verification is not None and verification.status == "fail"):
        return results
    try:
        return replace(
            results, export=artefacts.export_of(settings, *given, folder=folder, progress=stage)
        )
    except KeyboardInterrupt as stop:
        stopped = f"{str(stop) or 'stopped by Ctrl-C'}; not done: the export"
        return replace(results, stopped=stopped)
