"""The document of a diagnosis: what is wrong and slow here, and each remedy once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prepare.core.document import Document, Items
from prepare.core.model.known_issues import FINE, INEXACT, NOT_PROBED, SLOW, VERDICTS, WRONG
from prepare.core.utils.text import plural

if TYPE_CHECKING:
    from prepare.stages.doctor.records import Diagnosis, Finding


def diagnosis_document(diagnosis: Diagnosis) -> Document:
    """Return what is shown of a diagnosis."""
    answers = plural(len(diagnosis.findings), "answer")
    counts = ", ".join(f"{len(diagnosis.of(verdict))} {verdict}" for verdict in VERDICTS)
    return Document(
        name="findings",
        title=f"Findings: {answers}",
        line=f"{answers} for {diagnosis.device}: {counts}; {diagnosis.seconds:.0f} s",
        parts=lambda: [Items(texts=tuple(diagnosis_lines(diagnosis)))],
    )


def diagnosis_lines(diagnosis: Diagnosis) -> Iterator[str]:
    """Yield a line for each finding, what to do once below those that it helps, and the others together."""
    by_remedy: dict[str, list[Finding]] = {}
    for verdict in (WRONG, INEXACT, SLOW):
        for finding in diagnosis.of(verdict):
            by_remedy.setdefault(finding.remedy, []).append(finding)
    for remedy, findings in by_remedy.items():
        yield from (f"{f.verdict}: {f.where} [{f.name}]: {f.reason}" for f in findings)
        yield f"    {remedy}"
    by_reason: dict[str, list[str]] = {}
    for finding in diagnosis.of(NOT_PROBED):
        by_reason.setdefault(finding.reason, []).append(finding.name)
    for reason, names in by_reason.items():
        yield f"{NOT_PROBED}: {', '.join(names)}: {reason}"
    if fine := diagnosis.of(FINE):
        yield f"{FINE}: {', '.join(finding.name for finding in fine)}"
