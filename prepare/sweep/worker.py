"""One job of a sweep, in a process of any launcher: executed once, and not if it has been done."""

from __future__ import annotations

import platform
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from prepare.core.utils.signals import Stopped
from prepare.errors import FileError
from prepare.job.outcome import DONE, Outcome
from prepare.job.record import KEPT, Job, Record, Result
from prepare.sweep.isolated_job import run_isolated
from prepare.sweep.locks import Claim, ClaimLost, ask_server, claim
from prepare.sweep.manifest import SweepManifest, is_led, job_claim

if TYPE_CHECKING:
    from prepare.job.execute import JobSpec


def run_in_sweep(
    spec: JobSpec, *, folder: Path, resume: bool, check: Callable[[], None]
) -> Outcome | None:
    """Execute the job, unless it is done; return None if another process is executing it.

    `folder` is that of the sweep: with `resume` the job may have been done anywhere in it. `check` is
    as in `prepare.sweep.isolated_job.run_isolated`.
    """
    job, record = spec.job, Record(spec.folder)
    # Most jobs of a sweep that is resumed: this leaves no claim behind.
    if job.identity and (result := _kept(job, record)):
        return Outcome(result, DONE)
    name = job_claim(folder, job.identity) if job.identity else None
    with claim(name) as held:
        if not held:
            return None
        if isinstance(held, Claim) and held.number:
            ask_server(record.folder)
        # Only now: the process that held the claim before may just have done the job.
        if job.identity and (result := _done(job, record, folder, resume=resume)):
            return Outcome(result, DONE)

        def check_both() -> None:
            if isinstance(held, Claim) and held.lost:
                raise ClaimLost
            check()

        try:
            return run_isolated(spec, check_both)
        except ClaimLost:
            return None


def stop_check(
    folder: Path, manifest: SweepManifest, *, outlives_command: bool
) -> Callable[[], None]:
    """Return a function that raises Stopped if the command line that started the sweep has ended.

    It never raises for a sweep of another machine, whose processes cannot be seen here, or if the job
    `outlives_command`.
    """
    watched = manifest.host == platform.node() and not outlives_command

    def check() -> None:
        if watched and not is_led(folder):
            raise Stopped("its sweep was stopped")

    return check


def _done(job: Job, record: Record, folder: Path, *, resume: bool) -> Result | None:
    """Return the result that need not be repeated; else remove what the job left under other numbers."""
    elsewhere = sorted(folder.rglob("job.json")) if resume else []
    for other in (record, *(Record(path.parent) for path in elsewhere)):
        if result := _kept(job, other):
            return result
        with suppress(FileError):
            if other.folder != record.folder and other.is_of(job):
                other.remove()
    return None


def _kept(job: Job, record: Record) -> Result | None:
    """Return the result of this job in a record, if it need not be repeated."""
    with suppress(FileError):
        if record.is_of(job) and (result := record.result()) and result.status in KEPT:
            return result
    return None
