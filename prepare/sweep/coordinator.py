"""The command line's part in a sweep: who may run in its folder, and that every row has an end."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from prepare.core.utils import files
from prepare.errors import ConfigError, FileError
from prepare.job.outcome import FAILED, Outcome, write_result
from prepare.job.record import Job, Record, Result, unusable
from prepare.sweep.locks import Lock, claimed, held
from prepare.sweep.manifest import (
    Planned,
    is_running,
    job_lock,
    make_folder,
    read_planned,
    sweep_lock,
    write_planned,
)

# How long what was stopped may take to end.
_PATIENCE = 4.0


class Lead:
    """Leads the sweep in `folder`, until `end`. As long as one leads, its workers go on.

    A new sweep has its folder for itself. With `resume` it takes up the one that is there, and shares
    the folder with others that do the same with the same rows.

    Raises:
        ConfigError: another sweep is running in the folder.
        FileError: the folder cannot be used.
    """

    def __init__(
        self,
        folder: Path,
        *,
        rows: list[list[str]] | None,
        identities: list[str | None],
        resume: bool,
    ) -> None:
        make_folder(folder)
        self.folder = folder
        try:
            self._lock = Lock(sweep_lock(folder))
        except OSError as error:
            raise unusable(folder, error, "hydra.sweep.dir") from error
        try:
            self.planned = self._begin(rows, identities, resume=resume)
        except BaseException:
            self._lock.close()
            raise

    def _begin(
        self, rows: list[list[str]] | None, identities: list[str | None], *, resume: bool
    ) -> Planned:
        alone = self._lock.take()
        if not alone and not (resume and self._lock.take(shared=True, patience=_PATIENCE)):
            raise self._busy("another sweep", ", or do its work together with resume=true")
        before = read_planned(self.folder) if resume else None
        if not alone:
            if before is None or before.identities != identities:
                raise self._busy("a sweep with other rows")
            return before
        planned = Planned(before.sweep if before else secrets.token_hex(8), rows, identities)
        write_planned(self.folder, planned)
        if not self._lock.take(shared=True):
            raise self._busy("another sweep")
        if not held(sweep_lock(self.folder)):
            # This file system has no locks, so nobody could tell whether the sweep goes on.
            planned = replace(planned, host="")
            write_planned(self.folder, planned)
        return planned

    def _busy(self, what: str, other: str = "") -> ConfigError:
        wrong = f"{what} is running in {files.printable_path(self.folder)}"
        return ConfigError(
            "hydra.sweep.dir", wrong, f"wait for it, or choose another folder{other}"
        )

    def others(self) -> int:
        """How many of the rows other processes are doing now."""
        return sum(is_running(self.folder, one) for one in self.planned.identities)

    def end(self, *, stopped: bool) -> None:
        """Waits for what still runs, and gives a result to every row that began and has none.

        Where the sweep was `stopped` its own workers are told to end, and are not waited for for long.
        """
        if stopped:
            self._lock.close()
        try:
            self._wait(_PATIENCE if stopped else float("inf"))
            self._reconcile(stopped=stopped)
        finally:
            self._lock.close()

    def _wait(self, patience: float) -> None:
        until = time.monotonic() + patience
        for identity in self.planned.identities:
            if identity is not None:
                rest = max(0.0, until - time.monotonic())
                held(job_lock(self.folder, identity), patience=rest)

    def _reconcile(self, *, stopped: bool) -> None:
        lost = Result("crashed", "lost", "its process ended without a result: killed?")
        if stopped:
            lost = Result("interrupted", "interrupted", "its sweep was stopped")
        for record, job in self._begun():
            lock = job_lock(self.folder, job.identity) if job.identity else None
            with claimed(lock) as free, suppress(FileError):
                if free and record.result() is None:
                    write_result(Outcome(lost, FAILED), record)

    def _begun(self) -> Iterator[tuple[Record, Job]]:
        for path in sorted(self.folder.rglob("job.json")):
            record = Record(path.parent)
            with suppress(FileError):
                job = record.job()
                if job and self.planned.number(job) is not None:
                    yield record, job
