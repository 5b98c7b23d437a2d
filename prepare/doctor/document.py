"""The document of a diagnosis: what is wrong, slow and not probed here, what to do, and the machine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prepare.core.document import Document, Facts, Items, Table
from prepare.core.model.known_issues import FINE, INEXACT, NOT_PROBED, SLOW, VERDICTS, WRONG
from prepare.core.utils.accelerator import NAMES
from prepare.core.utils.text import plural

if TYPE_CHECKING:
    from prepare.core.document import Part
    from prepare.doctor.records import Diagnosis, Finding

_COLUMNS = (
    *(("Verdict", "word"), ("Operation", "prose"), ("What to do", "prose")),
    *(("Measured", "prose"), ("Issue", "code")),
)


def diagnosis_document(diagnosis: Diagnosis) -> Document:
    """Return what is shown of a diagnosis."""
    return Document(
        name="findings",
        title=f"Findings: {plural(len(diagnosis.findings), 'answer')}",
        line=_counts(diagnosis),
        parts=lambda: _parts(diagnosis),
    )


def _parts(diagnosis: Diagnosis) -> Iterator[Part]:
    yield Items(texts=tuple(diagnosis_lines(diagnosis)), where="terminal")
    findings = sorted(diagnosis.findings, key=lambda each: VERDICTS.index(each.verdict))
    rows = [(f.verdict, f.where, f.remedy, f.reason, f.name) for f in findings]
    yield Table(
        label="Findings",
        columns=_COLUMNS,
        rows=rows,
        file="doctor.json",
        form="stacked",
        where="page",
    )
    yield Facts(rows=_machine(diagnosis), title="Machine", where="page")


def diagnosis_lines(diagnosis: Diagnosis) -> Iterator[str]:
    """Yield the lines of a diagnosis: one for each finding, and one below it for what to do."""
    for verdict in (WRONG, INEXACT, SLOW, NOT_PROBED):
        for finding in diagnosis.of(verdict):
            yield _finding(finding)
            if finding.remedy:
                yield f"    {finding.remedy}"
    if fine := diagnosis.of(FINE):
        yield f"{FINE}: {', '.join(finding.name for finding in fine)}"


def _counts(diagnosis: Diagnosis) -> str:
    counts = (f"{len(diagnosis.of(verdict))} {verdict}" for verdict in VERDICTS)
    probes = plural(len(diagnosis.findings), "answer")
    return f"{probes} for {diagnosis.device}: {', '.join(counts)}; {diagnosis.seconds:.0f} s"


def _finding(finding: Finding) -> str:
    known = "" if finding.known else ", not known before" if finding.remedy else ", general"
    return f"{finding.verdict}: {finding.where} [{finding.name}{known}]: {finding.reason}"


def _machine(diagnosis: Diagnosis) -> tuple[tuple[str, str], ...]:
    environment = diagnosis.environment
    accelerator = environment.get("accelerator") or {}
    versions = {"torch": environment.get("torch"), "Python": environment.get("python")}
    versions |= {NAMES[key]: accelerator.get(key) for key in NAMES}
    known = (
        f"{name} {', '.join(value) if isinstance(value, list) else value}"
        for name, value in versions.items()
        if value
    )
    processor = str(environment.get("cpu") or "not known")
    return ("Processor", processor), ("Versions", ", ".join(known))
