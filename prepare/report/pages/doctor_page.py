"""The page of a diagnosis: one table of all findings, and the machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from prepare.core.utils import files
from prepare.doctor.records import VERDICTS
from prepare.report.pages.page import page
from prepare.report.pages.section import sections

if TYPE_CHECKING:
    from prepare.doctor.records import Diagnosis


def write_doctor_page(diagnosis: Diagnosis, path: Path) -> None:
    """Write the page. Raises FileError."""
    files.write_text(path, doctor_page(diagnosis))


def doctor_page(diagnosis: Diagnosis) -> str:
    """Return the page; the same diagnosis gives the same bytes."""
    wrong, slow = (len(diagnosis.of(verdict)) for verdict in VERDICTS[:2])
    verdict = f"{wrong} wrong and {slow} slow on {diagnosis.device}"
    drawn = sections([diagnosis.document()], [])
    return page("doctor", drawn, verdict=verdict, about=("diagnosis of a machine",))
