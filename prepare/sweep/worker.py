"""One job of a sweep, in whatever process its engine runs it: once, and not where it has been done."""

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
from prepare.sweep.locks import claimed, held
from prepare.sweep.manifest import Planned, job_lock, sweep_lock

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
    with claimed(lock) as mine:
        if not mine:
            return None
        # Asked with the lock in hand: whoever had it before may just have done the job.
        if job.identity and (result := _done(job, Record(spec.folder), folder, resume=resume)):
            return Outcome(result, DONE)
        return run_isolated(spec, check)


def checker(folder: Path, planned: Planned, *, goes_on: bool) -> Callable[[], None]:
    """A function that raises Stopped where the command line that started the sweep has ended.

    Of one on another machine that cannot be told; and with `goes_on` the job is not to end with it.
    """
    watched = planned.host == platform.node() and not goes_on

    def check() -> None:
        if watched and not held(sweep_lock(folder)):
            raise Stopped("its sweep was stopped")

    return check


def _done(job: Job, record: Record, folder: Path, *, resume: bool) -> Result | None:
    """How the job ended, if it need not be done again; else what it left under another number goes."""
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
