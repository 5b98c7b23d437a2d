"""The answer of a job's page on its artefact, and the advice."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prepare.core.utils.text import size
from prepare.report.answer import Answer
from prepare.report.sentences import layouts_text

if TYPE_CHECKING:
    from prepare.export.records import Export

_SECTION = "export"
_Advice = tuple[str, str, str, str]


def export_answer(export: Export) -> Answer:
    """Return whether the artefact is right."""
    found = {
        "pass": ("good", f"Right as {export.exporter}"),
        "fail": ("bad", f"Wrong as {export.exporter}"),
        "refused": ("bad", f"Not exported to {export.exporter}"),
        "cannot tell": ("warn", f"Cannot tell if right as {export.exporter}"),
    }
    kind, answer = found[export.status]
    remark = export.reason or f"{export.artefact}, {size(export.bytes)}"
    if "wrong" in export.contract.layouts.values():
        remark = f"inputs {layouts_text(export)}"
    return Answer(question="Exported?", kind=kind, answer=answer, remark=remark, section=_SECTION)


def export_advice(export: Export, advice: _Advice) -> _Advice:
    """Return kind, answer, remark and section of the advice; `advice` is that on the model."""
    if export.status == "fail":
        return "bad", "Do not use the artefact", "its answers are below", _SECTION
    if export.status == "refused":
        return "bad", "Choose another format", "the stage that failed is below", _SECTION
    if export.status == "pass" and advice[0] == "good":
        return "good", f"Use {export.artefact}", "as its contract says", _SECTION
    return advice
