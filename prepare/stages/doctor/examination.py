"""Choose the probes that concern a machine, run each in a child process, and name what to do."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from prepare.core.model.doctor_findings import answers_file
from prepare.core.model.known_issues import (
    FINE,
    FOUND,
    NOT_PROBED,
    REPAIR_STEP,
    Issue,
    issues,
)
from prepare.core.utils.accelerator import accelerator
from prepare.core.utils.child_process import Worker
from prepare.core.utils.suggest import choose
from prepare.core.utils.text import first_line, size
from prepare.core.utils.wording import step
from prepare.errors import ConfigError, FileError, Problem, RefusedError
from prepare.stages.doctor.cases import CaseOutcome
from prepare.stages.doctor.probes import KNOWN
from prepare.stages.doctor.records import Diagnosis, Finding

# The most bytes of one probe.
_MEMORY, _GPU_MEMORY = 4 << 30, 24 << 30
_NO_PROBE = {"over_2_31": "its sizes need more than 8 GiB of memory"}
_CURES = {
    "format": "use the format {}",
    "flag": "set {}",
    "version": "install {}",
    "step": "add the step {}",
}
_NO_TIME = CaseOutcome(NOT_PROBED, "no time was left")


def examine(
    device: str | None = None,
    *,
    seconds: float = 120.0,
    probes: Sequence[str] | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> Diagnosis:
    """Run the probe of every known issue that could concern a device.

    Each probe runs in a process of its own with a limit of time and memory: forward and backward, judged by
    float64 on the CPU, and paired rounds for what may be slow. A probe that crashes, hangs or runs out of
    memory is a finding. A plan on this machine asks these answers before the table of known issues, for 30
    days or until torch, the processor or a library of the accelerator changes.

    Args:
        device: by default the accelerator, if there is one, else the CPU.
        seconds: no probe begins after this time.
        probes: names of known issues; all by default. A plan asks only answers to all.
        progress: called with the operation, the number of finished probes and of all, after each probe.

    Raises:
        ConfigError: a probe does not exist, or `seconds` is not positive.
        RefusedError: the device is not available.
    """
    problems = [
        Problem("probes", f"{name!r} is not a probe", choose(name, KNOWN, noun="probes"))
        for name in probes or ()
        if name not in KNOWN
    ]
    if not seconds > 0:
        remedy = "give seconds, as in 120"
        problems.append(Problem("seconds", f"{seconds!r} is not positive", remedy))
    if problems:
        raise ConfigError.of(problems)
    began, machine = time.perf_counter(), accelerator()
    best = "cuda" if machine["backend"] == "rocm" else str(machine["backend"])
    device = _usable(device or best)
    backend = "rocm" if machine["hip"] and device.startswith("cuda") else device.partition(":")[0]
    table = [issue for issue in issues() if backend in issue.backend]
    table = [issue for issue in table if probes is None or issue.probe in probes]
    names = list(dict.fromkeys(issue.probe for issue in table if issue.probe in KNOWN))
    memory = _GPU_MEMORY if device.startswith("cuda") else _MEMORY
    answers: dict[str, CaseOutcome] = {}
    with Worker(f"{answer.__module__}:{answer.__name__}") as worker:
        for name in names:
            if answers and time.perf_counter() - began > seconds:
                break
            answers[name] = _ask(worker, {"probe": name, "device": device, "memory": memory})
            if progress is not None:
                progress(KNOWN[name].where, len(answers), len(names))
    diagnosis = Diagnosis(
        device=device,
        findings=tuple(_finding(issue, answers) for issue in table),
        seconds=round(time.perf_counter() - began, 3),
    )
    if probes is None:
        _remember(diagnosis)
    return diagnosis


def _usable(device: str) -> str:
    """Return the device; raise RefusedError if torch cannot use it here."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        wrong = f"{device} cannot be used here: {first_line(error)}"
        raise RefusedError("device", wrong, "leave it out, or give cpu") from error
    return device


def _ask(worker: Worker, request: dict[str, Any]) -> CaseOutcome:
    """Return the outcome of a probe that runs in a child process."""
    reply, death = worker.ask(request, seconds=KNOWN[request["probe"]].seconds)
    return CaseOutcome(**reply) if reply else CaseOutcome("wrong here", f"its process {death}")


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Run the probe of a request, on its device and within its memory; return the outcome as plain data."""
    _limit_memory(request)
    warnings.simplefilter("ignore")
    try:
        return asdict(run_probe(request["probe"], request["device"]))
    except Exception as error:  # a crash is a finding too; the other probes continue
        # torch raises RuntimeError from its allocators, on a CPU and on a GPU.
        allocator = isinstance(error, RuntimeError) and "memory" in str(error).lower()
        text = f"it raises {type(error).__name__}: {first_line(error)}"
        if allocator or isinstance(error, MemoryError):
            text = f"it needs more memory than {size(request['memory'])}"
        return asdict(CaseOutcome("wrong here", text))


def run_probe(name: str, device: str) -> CaseOutcome:
    """Run one probe in this process; return the worst outcome of its cases."""
    outcomes = []
    for outcome in KNOWN[name].run(device):
        outcomes.append(outcome)
        if outcome.bad == "wrong here":
            return outcome
    order = ("", "unclear", "lost here", "slow here", "inexact here")
    return max(outcomes, key=lambda each: (order.index(each.bad), not _has_not_run(each)))


def _has_not_run(outcome: CaseOutcome) -> bool:
    return outcome.text.startswith("not run")


def _limit_memory(request: dict[str, Any]) -> None:
    """Limit what this process may allocate from now on; on a GPU, the share of its memory."""
    if request["device"] != "cpu":
        if request["device"].startswith("cuda"):
            total = torch.cuda.get_device_properties(request["device"]).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, request["memory"] / total))
        return
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        used = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
        limit = used + request["memory"]
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _finding(issue: Issue, answers: dict[str, CaseOutcome]) -> Finding:
    probe = KNOWN.get(issue.probe)
    outcome = answers.get(issue.probe, _NO_TIME)
    if probe is None:
        why = _NO_PROBE.get(issue.sizes, "no probe exists: it takes several processes")
        outcome = CaseOutcome(NOT_PROBED, why)
    verdict = outcome.bad or (NOT_PROBED if _has_not_run(outcome) else FINE)
    verdict = NOT_PROBED if verdict == "unclear" else verdict
    cures = ", or ".join(_cure(*each, issue.effect) for each in issue.cure)
    remedy = cures or "exclude these modules, or use another format"
    if issue.dtypes and "repair" not in dict(issue.cure):
        remedy = f"in {' and '.join(issue.dtypes)} only: {remedy}"
    return Finding(
        name=issue.name,
        verdict=verdict,
        where=probe.where if probe else ", ".join(issue.operations),
        reason=outcome.text,
        remedy=remedy if verdict in FOUND else "",
    )


def _cure(kind: str, cure: str, effect: str) -> str:
    if kind == "repair":
        return f"add {step(REPAIR_STEP, **({'exact': True} if effect == 'inexact' else {}))}"
    return _CURES[kind].format(cure)


def _remember(diagnosis: Diagnosis) -> None:
    """Store the answers for plans; a cache that cannot be written does not fail the run."""
    path = answers_file(diagnosis.device)
    with contextlib.suppress(OSError, FileError):
        path.parent.mkdir(parents=True, exist_ok=True)
        diagnosis.save(path)
