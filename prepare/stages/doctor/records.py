"""The findings of the doctor as plain data; `doctor.json` is written and read without torch."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from prepare.core.model.known_issues import VERDICTS, WRONG
from prepare.core.utils.environment import check_environment
from prepare.core.utils.json_records import JsonRecord, Kind, Readable
from prepare.errors import DoctorError

if TYPE_CHECKING:
    from prepare.core.document import Document

# What of an environment may be shared: no paths, no names of hosts or repositories.
_SHARED = ("python", "torch", "packages", "cpu", "instructions", "cores", "threads", "devices")
_PATH = re.compile(r"(?:[A-Za-z]:)?(?:[\\/][^\s\\/'\":,;()]+){2,}|~[\\/]\S+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The answer of one probe.

    `name` is that of the known issue, or of a general probe if `known` is False. `where` names the
    operation, `reason` what was measured or why nothing was, `remedy` what to do. `error` and `allowed`
    are relative to the largest number, `ratio` and its interval are of times; None if not measured.
    """

    name: str
    known: bool
    verdict: str
    where: str
    reason: str
    remedy: str = ""
    error: float | None = None
    allowed: float | None = None
    ratio: float | None = None
    ratio_interval: tuple[float, float] | None = None
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Diagnosis(JsonRecord, Readable):
    """The findings on one device of one machine."""

    KIND: ClassVar[Kind] = Kind("prepare.doctor", 1, "a diagnosis", "a doctor.json", DoctorError)
    device: str
    findings: tuple[Finding, ...]
    environment: dict[str, Any]
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
        """Raise ValueError if the environment or a verdict is none."""
        check_environment(self.environment)
        for each in self.findings:
            if each.verdict not in VERDICTS:
                raise ValueError(f"{each.verdict!r} is not a verdict")

    def shared(self) -> Diagnosis:
        """Return the diagnosis without paths, names of hosts and commits, to attach to an issue."""
        known = {key: self.environment.get(key) for key in (*_SHARED, "accelerator")}
        findings = (replace(each, reason=_PATH.sub("PATH", each.reason)) for each in self.findings)
        return replace(self, environment=known, findings=tuple(findings))
