"""The findings of the doctor as plain data, which plans on this machine read without torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from prepare.core.document import Document, Items
from prepare.core.model.known_issues import FINE, FOUND, NOT_PROBED, VERDICTS, WRONG
from prepare.core.utils.json_records import JsonRecord, Kind, Readable
from prepare.core.utils.text import plural
from prepare.errors import DoctorError


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
        answers = plural(len(self.findings), "answer")
        counts = ", ".join(f"{len(self.of(verdict))} {verdict}" for verdict in VERDICTS)
        return Document(
            name="findings",
            title=f"Findings: {answers}",
            line=f"{answers} for {self.device}: {counts}; {self.seconds:.0f} s",
            parts=lambda: [Items(texts=tuple(diagnosis_lines(self)))],
        )

    def check(self) -> None:
        """Raise ValueError if a verdict is none."""
        for each in self.findings:
            if each.verdict not in VERDICTS:
                raise ValueError(f"{each.verdict!r} is not a verdict")


def diagnosis_lines(diagnosis: Diagnosis) -> Iterator[str]:
    """Yield a line for each finding; a remedy stands once, below the findings that it helps."""
    by_remedy: dict[str, list[Finding]] = {}
    for verdict in FOUND:
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
