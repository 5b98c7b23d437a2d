"""The page of a diagnosis: one table of all findings, and the machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from markupsafe import Markup

from prepare.core.utils import files
from prepare.core.utils.accelerator import NAMES
from prepare.core.utils.text import plural
from prepare.doctor.records import VERDICTS
from prepare.report.pages.long_table import long_table
from prepare.report.pages.page import PageSection, page
from prepare.report.render import render

if TYPE_CHECKING:
    from prepare.doctor.records import Diagnosis

_COLUMNS = [
    *[("Verdict", "word"), ("Operation", "prose"), ("What to do", "prose")],
    *[("Measured", "prose"), ("Issue", "code")],
]


def write_doctor_page(diagnosis: Diagnosis, path: Path) -> None:
    """Write the page. Raises FileError."""
    files.write_text(path, doctor_page(diagnosis))


def doctor_page(diagnosis: Diagnosis) -> str:
    """Return the page; the same diagnosis gives the same bytes."""
    findings = sorted(diagnosis.findings, key=lambda each: VERDICTS.index(each.verdict))
    rows = [(f.verdict, f.where, f.remedy, f.reason, f.name) for f in findings]
    title = f"Findings: {plural(len(rows), 'answer')}"
    text = render(
        "doctor/findings.html", title=title, table=long_table(_COLUMNS, rows, "doctor.json")
    )
    sections = [PageSection("findings", title, Markup(text))]  # noqa: S704  rendered with escaping
    machine = render("sections/environment.html", **_machine(diagnosis))
    sections.append(PageSection("machine", "Machine", Markup(machine)))  # noqa: S704
    wrong, slow = (len(diagnosis.of(verdict)) for verdict in VERDICTS[:2])
    verdict = f"{wrong} wrong and {slow} slow on {diagnosis.device}"
    return page("doctor", sections, verdict=verdict, about=("diagnosis of a machine",))


def _machine(diagnosis: Diagnosis) -> dict[str, dict[str, str]]:
    environment = diagnosis.environment
    accelerator = environment.get("accelerator") or {}
    versions = {"torch": environment.get("torch"), "Python": environment.get("python")}
    versions |= {NAMES[key]: accelerator.get(key) for key in NAMES}
    known = {
        name: ", ".join(value) if isinstance(value, list) else str(value)
        for name, value in versions.items()
        if value
    }
    return {"machine": {"Processor": str(environment.get("cpu") or "not known")}, "versions": known}
