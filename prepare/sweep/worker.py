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
from prepare.sweep.locks import claim, is_held
from prepare.sweep.manifest import SweepManifest, job_lock, sweep_lock

if TYPE_CHECKING:
    from prepare.job.spec import JobSpec


def run_in_sweep(
    spec: JobSpec, *, folder: Path, resume: bool, check: Callable[[], None]
) -> Outcome | None:
    """Execute the job, unless it is done; return None if another process is executing it.

    `folder` is that of the sweep: with `resume` the job may have been done anywhere in it. `check` is
    as in `prepare.sweep.isolated_job.run_isolated`.
    """
    job = spec.job
    lock = job_lock(folder, job.identity) if job.identity else None
    with claim(lock) as claimed:
        if not claimed:
            return None
        # Only now: the process that held the lock before may just have done the job.
        if job.identity and (result := _done(job, Record(spec.folder), folder, resume=resume)):
            return Outcome(result, DONE)
        return run_isolated(spec, check)


def stop_check(
    folder: Path, manifest: SweepManifest, *, outlives_command: bool
) -> Callable[[], None]:
    """Return a function that raises Stopped if the command line that started the sweep has ended.

    It never raises for a sweep of another machine, whose locks cannot be seen here, or if the job
    `outlives_command`.
    """
    watched = manifest.host == platform.node() and not outlives_command

    def check() -> None:
        if watched and not is_held(sweep_lock(folder)):
            raise Stopped("its sweep was stopped")

    return check


def _done(job: Job, record: Record, folder: Path, *, resume: bool) -> Result | None:
    """Return the result that need not be repeated; else remove what the job left under other numbers."""
    elsewhere = sorted(folder.rglob("job.json")) if resume else []
    for other in (record, *(Record(path.parent) for path in elsewhere)):
        with suppress(FileError):
            if not other.is_of(job):
                continue
            if (result := other.result()) and result.status in KEPT:
                return result
            if other.folder != record.folder:
                other.remove()
    return None
