"""The page of a diagnosis: one table of all findings, and the machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from prepare.core.document import Document, Facts, Table
from prepare.core.utils import files
from prepare.core.utils.accelerator import NAMES
from prepare.core.utils.text import plural
from prepare.doctor.records import VERDICTS
from prepare.report.pages.page import page
from prepare.report.pages.section import sections

if TYPE_CHECKING:
    from prepare.doctor.records import Diagnosis

_COLUMNS = (
    *(("Verdict", "word"), ("Operation", "prose"), ("What to do", "prose")),
    *(("Measured", "prose"), ("Issue", "code")),
)


def write_doctor_page(diagnosis: Diagnosis, path: Path) -> None:
    """Write the page. Raises FileError."""
    files.write_text(path, doctor_page(diagnosis))


def doctor_page(diagnosis: Diagnosis) -> str:
    """Return the page; the same diagnosis gives the same bytes."""
    findings = sorted(diagnosis.findings, key=lambda each: VERDICTS.index(each.verdict))
    rows = [(f.verdict, f.where, f.remedy, f.reason, f.name) for f in findings]
    title = f"Findings: {plural(len(rows), 'answer')}"
    table = Table(label=title, columns=_COLUMNS, rows=rows, file="doctor.json")
    documents = [
        Document(name="findings", title=title, place=1, parts=lambda: (table,)),
        Document(
            name="machine",
            title="Machine",
            place=2,
            parts=lambda: (Facts(rows=_machine(diagnosis)),),
        ),
    ]
    wrong, slow = (len(diagnosis.of(verdict)) for verdict in VERDICTS[:2])
    verdict = f"{wrong} wrong and {slow} slow on {diagnosis.device}"
    drawn = sections(documents, [])
    return page("doctor", drawn, verdict=verdict, about=("diagnosis of a machine",))


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
