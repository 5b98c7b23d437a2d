"""Choose the probes that concern a machine, run them within a time, and name what to do."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch

from prepare.core.model.issues_here import answers_file
from prepare.core.model.known_issues import Issue, issues
from prepare.core.utils.accelerator import accelerator
from prepare.core.utils.child_process import Worker
from prepare.core.utils.environment import environment
from prepare.core.utils.wording import step
from prepare.doctor.probes import GENERAL, KNOWN, PROBES
from prepare.doctor.records import FINE, NOT_PROBED, SLOW, WRONG, Diagnosis, Finding
from prepare.doctor.worker import answer, wrong
from prepare.errors import FileError, RefusedError

# Bytes of one probe.
_MEMORY, _GPU_MEMORY = 4 << 30, 24 << 30
_NO_PROBE = {
    "over_2_31": "its sizes need more than 8 GiB of memory",
    "crowded_machine": "it depends on other programs",
}
_CURES = {
    "format": "use the format {}",
    "flag": "set {}",
    "version": "install {}",
}


def run_examination(
    device: str | None,
    *,
    seconds: float,
    dry_run: bool,
    progress: Callable[[str, int, int], None] | None,
    only: Sequence[str] | None = None,
) -> Diagnosis:
    """Run the probes of a device. With `dry_run`, run every probe of every backend, on the CPU."""
    began, machine = time.perf_counter(), accelerator()
    device = "cpu" if dry_run else _usable(device or _best(machine))
    backend = "rocm" if machine["hip"] and device.startswith("cuda") else device.partition(":")[0]
    table = [issue for issue in issues() if dry_run or backend in issue.backend]
    names = [issue.probe for issue in table if issue.probe in KNOWN] + list(GENERAL)
    names = [name for name in names if only is None or name in only]
    cuda = device.startswith("cuda")
    answers: dict[str, dict[str, Any]] = {}
    with Worker(f"{answer.__module__}:{answer.__name__}") as worker:
        for name in names:
            if answers and time.perf_counter() - began > seconds:
                break
            request = {"probe": name, "device": device, "memory": _GPU_MEMORY if cuda else _MEMORY}
            answers[name] = _answer(worker, request)
            if progress is not None:
                progress(PROBES[name].where, len(answers), len(names))
    findings = [_of_issue(issue, answers) for issue in table if only is None or issue.name in only]
    findings += [_of_general(name, answers) for name in GENERAL if name in names]
    diagnosis = Diagnosis(
        device=device,
        findings=tuple(findings),
        environment=environment(),
        seconds=round(time.perf_counter() - began, 3),
    )
    if not dry_run and only is None:
        _remember(diagnosis)
    return diagnosis


def _best(machine: dict[str, Any]) -> str:
    backend = str(machine["backend"])
    return "cuda" if backend == "rocm" else backend


def _usable(device: str) -> str:
    """Return the device; raise RefusedError if torch cannot use it here."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        wrong = f"{device} cannot be used here: {str(error).splitlines()[0]}"
        raise RefusedError("device", wrong, "leave it out, or give cpu") from error
    return device


def _answer(worker: Worker, request: dict[str, Any]) -> dict[str, Any]:
    """Return the outcome of a probe as plain data, with its seconds."""
    began = time.perf_counter()
    found, death = worker.ask(request, seconds=PROBES[request["probe"]].seconds)
    outcome = found or asdict(wrong(f"its process {death}"))
    return outcome | {"seconds": round(time.perf_counter() - began, 3)}


def _of_issue(issue: Issue, answers: dict[str, dict[str, Any]]) -> Finding:
    cures = ", or ".join(_cure(*each) for each in issue.cure)
    remedy = cures or "exclude these modules, or use another format"
    where = PROBES[issue.probe].where if issue.probe in PROBES else ", ".join(issue.operations)
    if issue.probe not in KNOWN:
        why = _NO_PROBE.get(issue.sizes, "no probe exists: it takes several processes")
        return _finding(issue.name, where, remedy, {"bad": NOT_PROBED, "text": why}, known=True)
    answer = answers.get(issue.probe, {"bad": NOT_PROBED, "text": "no time was left"})
    return _finding(issue.name, where, remedy, answer, known=True)


def _cure(kind: str, cure: str) -> str:
    return f"add {step('repair_layout')}" if kind == "repair" else _CURES[kind].format(cure)


def _of_general(name: str, answers: dict[str, dict[str, Any]]) -> Finding:
    answer = answers.get(name, {"bad": NOT_PROBED, "text": "no time was left"})
    remedy = "use another format or dtype for these modules, and report it: doctor share"
    return _finding(name, PROBES[name].where, remedy, answer, known=False)


def _finding(name: str, where: str, remedy: str, answer: dict[str, Any], *, known: bool) -> Finding:
    text, verdict = answer["text"], answer["bad"] or FINE
    if verdict == "unclear" or (verdict == FINE and text.startswith("not run")):
        verdict = NOT_PROBED
    interval = answer.get("interval")
    return Finding(
        name=name,
        known=known,
        verdict=verdict,
        where=where,
        reason=text,
        remedy=remedy if verdict in (WRONG, SLOW) else "",
        error=answer.get("error"),
        allowed=answer.get("allowed"),
        ratio=answer.get("ratio"),
        ratio_interval=tuple(interval) if interval else None,
        seconds=answer.get("seconds", 0.0),
    )


def _remember(diagnosis: Diagnosis) -> None:
    """Store the answers for plans; a cache that cannot be written does not fail the run."""
    path = answers_file(diagnosis.device)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        diagnosis.save(path)
    except (OSError, FileError):
        return
