"""The section of a run's page on its artefact: the verdict of each stage, the contract and the time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prepare.core.utils.speed import verdict_text
from prepare.core.utils.text import size
from prepare.report.sentences import export_sentence, seconds, taken_out_text

if TYPE_CHECKING:
    from prepare.export.records import Export, InputContract
    from prepare.job.results import SavedResults


def exported(run: SavedResults) -> dict[str, Any] | None:
    """Return the stages, the checks of input layouts, and what the artefact takes."""
    export = run.export
    if export is None:
        return None
    return {
        "sentence": export_sentence(export),
        "facts": _facts(export),
        "stages": [
            (stage.name, stage.status, seconds(stage.seconds), stage.note)
            for stage in export.stages
        ],
        "checks": export.checks,
        "inputs": [_input(each) for each in export.contract.inputs],
        "taken_out": [taken_out_text(item) for item in export.taken_out],
        "times": _times(export),
    }


def _facts(export: Export) -> list[tuple[str, str]]:
    contract = export.contract
    formats = "converts its inputs to the dtype and memory format of the model"
    facts = [
        ("Artefact", f"{export.artefact}, {size(export.bytes)}" if export.artefact else ""),
        ("sha256", export.sha256),
        ("Versions", ", ".join(f"{name} {version}" for name, version in export.versions.items())),
        ("Inputs", formats if contract.formats_inputs else "takes its inputs as they are"),
        ("Contract", "give contiguous inputs only" if contract.requires_contiguous else ""),
        ("Recipe", "in the artefact" if export.recipe_inside else "beside the artefact only"),
        ("Environment", ", ".join(f"{key}={value}" for key, value in contract.environment.items())),
    ]
    return [(name, text) for name, text in facts if text]


def _input(contract: InputContract) -> tuple[str, str, str, str]:
    sizes = ", ".join("any" if size is None else str(size) for size in contract.shape)
    return contract.name, f"[{sizes}]", contract.dtype, str(list(contract.strides))


def _times(export: Export) -> list[tuple[str, str, str]]:
    if export.time is None:
        return []
    return [
        (
            row.name,
            "" if row.seconds is None else seconds(row.seconds),
            verdict_text(row.verdict, row.ratio, row.ratio_interval),
        )
        for row in export.time.rows
    ]
