"""The findings of the doctor as plain data, which plans on this machine read without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from prepare.core.model.known_issues import VERDICTS, WRONG
from prepare.core.utils.json_records import JsonRecord, Kind, Readable
from prepare.errors import DoctorError

if TYPE_CHECKING:
    from prepare.core.document import Document


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The answer to one known issue.

    `name` is that of the issue, `where` its operation, `reason` what was measured or why nothing was, and
    `remedy` what to do; empty if nothing is wrong.
    """

    name: str
    verdict: str
    where: str
    reason: str
    remedy: str = ""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Diagnosis(JsonRecord, Readable):
    """The findings on one device of this machine."""

    KIND: ClassVar[Kind] = Kind("prepare.doctor", 2, "a diagnosis", "a doctor.json", DoctorError)
    device: str
    findings: tuple[Finding, ...]
    seconds: float

    def of(self, verdict: str) -> list[Finding]:
        """Return the findings with this verdict."""
        return [each for each in self.findings if each.verdict == verdict]

    @property
    def exit_code(self) -> int:
        """1 if something is wrong here, else 0."""
        return int(bool(self.of(WRONG)))

    def document(self) -> Document:
        """Return what is shown of it."""
        from prepare.stages.doctor.document import diagnosis_document

        return diagnosis_document(self)

    def check(self) -> None:
        """Raise ValueError if a verdict is none."""
        for each in self.findings:
            if each.verdict not in VERDICTS:
                raise ValueError(f"{each.verdict!r} is not a verdict")
