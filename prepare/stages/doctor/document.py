"""The document of a diagnosis: what is wrong, slow and not probed here, what to do, and the machine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from prepare.core.document import Document, Facts, Folded, Items, Table, columns
from prepare.core.model.known_issues import FINE, INEXACT, NOT_PROBED, SLOW, VERDICTS, WRONG
from prepare.core.utils.accelerator import NAMES
from prepare.core.utils.text import capitalized, plural

if TYPE_CHECKING:
    from prepare.core.document import Part
    from prepare.stages.doctor.records import Diagnosis, Finding

_COLUMNS = columns("Verdict word, Operation prose, Measured prose, Issue code")
# The words of the first sentence.
_BAD = {WRONG: "wrong", INEXACT: "inexact", SLOW: "slow"}


def diagnosis_document(diagnosis: Diagnosis) -> Document:
    """Return what is shown of a diagnosis."""
    return Document(
        name="findings",
        title=f"Findings: {plural(len(diagnosis.findings), 'answer')}",
        line=_counts(diagnosis),
        parts=lambda: _parts(diagnosis),
    )


def verdict_sentence(diagnosis: Diagnosis) -> str:
    """Return `4 wrong, 8 slow on cpu. Add +steps.repair_layout={} for 11 of 12, ...`."""
    counts = [f"{len(diagnosis.of(v))} {word}" for v, word in _BAD.items() if diagnosis.of(v)]
    bad = [finding for verdict in _BAD for finding in diagnosis.of(verdict)]
    if not bad:
        return f"Nothing is wrong or slow on {diagnosis.device}, of what was probed"
    remedies = Counter(finding.remedy for finding in bad if finding.remedy)
    cures = [
        f"{remedy} for {count} of {len(bad)}" if not at else f"{remedy} for {count}"
        for at, (remedy, count) in enumerate(remedies.most_common())
    ]
    found = f"{', '.join(counts)} on {diagnosis.device}"
    return f"{found}. {capitalized(', '.join(cures))}" if cures else found


def _parts(diagnosis: Diagnosis) -> Iterator[Part]:
    yield Items(texts=tuple(diagnosis_lines(diagnosis)), where="terminal")
    for remedy, findings in _by_remedy(diagnosis).items():
        yield _table(capitalized(remedy) or "Without a remedy", findings)
    for verdict, title in ((FINE, "fine"), (NOT_PROBED, "not probed")):
        if found := diagnosis.of(verdict):
            yield Folded(title=f"{len(found)} {title}", parts=(_table("", found),))
    machine = (Facts(rows=_machine(diagnosis)),)
    yield Folded(title="Machine", parts=machine)


def _table(title: str, findings: Iterable[Finding]) -> Table:
    rows = [(f.verdict, f.where, f.reason, f.name) for f in findings]
    return Table(
        label=title or "Findings",
        title=title,
        columns=_COLUMNS,
        rows=rows,
        file="doctor.json",
        form="stacked",
        where="page",
    )


def _by_remedy(diagnosis: Diagnosis) -> dict[str, list[Finding]]:
    """Return what is wrong, inexact or slow by what to do, the worst first; without a remedy last."""
    found: dict[str, list[Finding]] = {}
    for verdict in _BAD:
        for finding in diagnosis.of(verdict):
            found.setdefault(finding.remedy, []).append(finding)
    return dict(sorted(found.items(), key=lambda each: not each[0]))


def diagnosis_lines(diagnosis: Diagnosis) -> Iterator[str]:
    """Yield a line for each finding, what to do once below those that it helps, and the others together."""
    for remedy, findings in _by_remedy(diagnosis).items():
        yield from map(_finding, findings)
        if remedy:
            yield f"    {remedy}"
    reasons: dict[str, list[str]] = {}
    for finding in diagnosis.of(NOT_PROBED):
        reasons.setdefault(finding.reason, []).append(finding.name)
    for reason, names in reasons.items():
        yield f"{NOT_PROBED}: {', '.join(names)}: {reason}"
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
