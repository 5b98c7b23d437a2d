"""Run one probe under a limit of memory, in a child process (see `prepare.core.utils.child_process`)."""

from __future__ import annotations

import contextlib
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

from prepare.core.utils.text import first_line, size
from prepare.doctor.cases import CaseOutcome
from prepare.doctor.probes import PROBES


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Run the probe of a request, on its device and within its memory; return the outcome as plain data."""
    _limit_memory(request)
    warnings.simplefilter("ignore")
    try:
        return asdict(run_probe(request["probe"], request["device"]))
    except Exception as error:  # a finding too; the other probes continue
        # torch raises RuntimeError from its allocators, on a CPU and on a GPU.
        allocator = isinstance(error, RuntimeError) and "memory" in str(error).lower()
        if allocator or isinstance(error, MemoryError):
            return asdict(wrong(f"it needs more memory than {size(request['memory'])}"))
        return asdict(wrong(f"it raises {type(error).__name__}: {first_line(error)}"))


def run_probe(name: str, device: str) -> CaseOutcome:
    """Run one probe in this process; return the worst outcome of its cases."""
    outcomes = []
    for outcome in PROBES[name].run(device):
        outcomes.append(outcome)
        if outcome.bad == "wrong here":
            return outcome
    order = ("", "unclear", "slow here", "inexact here")
    return max(outcomes, key=lambda each: (order.index(each.bad), each.error or 0.0))


def wrong(text: str) -> CaseOutcome:
    """Return the outcome of a probe that could not compare anything."""
    return CaseOutcome("wrong here", text)


def _limit_memory(request: dict[str, Any]) -> None:
    """Limit what this process may allocate from now on; on a GPU, the share of its memory."""
    if request["device"] != "cpu":
        import torch

        if request["device"].startswith("cuda"):
            total = torch.cuda.get_device_properties(request["device"]).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, request["memory"] / total))
        return
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        used = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
        limit = used + request["memory"]
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
