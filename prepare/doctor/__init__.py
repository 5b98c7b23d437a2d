"""Find out by probes what torch computes wrongly or slowly on this very machine.

Examples:
    >>> diagnosis = examine("cpu", probes=["softmax_layout"])
    >>> [(found.name, found.verdict) for found in diagnosis.findings]
    [('softmax_layout', 'slow here')]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from prepare.doctor.records import Diagnosis, Finding

__all__ = ["Diagnosis", "Finding", "examine"]


def examine(
    device: str | None = None,
    *,
    seconds: float = 120.0,
    probes: Sequence[str] | None = None,
    dry_run: bool = False,
    progress: Callable[[str, int, int], None] | None = None,
) -> Diagnosis:
    """Run the probe of every known issue that could concern a device, and general probes of operations.

    Each probe runs in a process of its own with a limit of time and memory: forward and backward, judged by
    float64 on the CPU, and paired rounds for what may be slow. A probe that crashes, hangs or runs out of
    memory is a finding. A plan on this machine asks these answers before the table of known issues, for 30
    days or until torch, the processor or a library of the accelerator changes.

    Args:
        device: by default the accelerator, if there is one, else the CPU.
        seconds: no probe begins after this time.
        probes: names of known issues and general probes; all by default. A plan asks only answers to all.
        dry_run: run all probes of all backends on the CPU, to see that they run; plans do not ask these.
        progress: called with the operation, the number of finished probes and of all, after each probe.

    Raises:
        ConfigError: a probe does not exist, or `seconds` is not positive.
        RefusedError: the device is not available.
    """
    from prepare.core.utils.suggest import choose
    from prepare.doctor.examination import run_examination
    from prepare.doctor.probes import PROBES
    from prepare.errors import ConfigError, Problem

    problems = [
        Problem("probes", f"{name!r} is not a probe", choose(name, PROBES, noun="probes"))
        for name in probes or ()
        if name not in PROBES
    ]
    if not seconds > 0:
        problems.append(
            Problem("seconds", f"{seconds!r} is not positive", "give seconds, as in 120")
        )
    if problems:
        raise ConfigError.of(problems)
    return run_examination(device, seconds=seconds, dry_run=dry_run, progress=progress, only=probes)
