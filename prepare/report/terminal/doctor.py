"""Print a diagnosis: a table of what is wrong, slow and not probed here, and what to do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prepare.core.utils.text import line, plural, printable
from prepare.doctor.records import FINE, NOT_PROBED, SLOW, VERDICTS, WRONG

if TYPE_CHECKING:
    from prepare.doctor.records import Diagnosis, Finding


def show_diagnosis(diagnosis: Diagnosis) -> None:
    """Print the findings by verdict, the worst first, and their number."""
    for text in diagnosis_lines(diagnosis):
        line(printable(text))


def diagnosis_lines(diagnosis: Diagnosis) -> Iterator[str]:
    """Yield the lines of a diagnosis: one for each finding, and one below it for what to do."""
    for verdict in (WRONG, SLOW, NOT_PROBED):
        for finding in diagnosis.of(verdict):
            yield _finding(finding)
            if finding.remedy:
                yield f"    {finding.remedy}"
    if fine := diagnosis.of(FINE):
        yield f"{FINE}: {', '.join(finding.name for finding in fine)}"
    counts = (f"{len(diagnosis.of(verdict))} {verdict}" for verdict in VERDICTS)
    probes = plural(len(diagnosis.findings), "answer")
    yield f"{probes} for {diagnosis.device}: {', '.join(counts)}; {diagnosis.seconds:.0f} s"


def _finding(finding: Finding) -> str:
    known = "" if finding.known else ", not known before" if finding.remedy else ", general"
    return f"{finding.verdict}: {finding.where} [{finding.name}{known}]: {finding.reason}"
