"""The command line's part in a sweep: take its folder, wait for its jobs, and give each a result."""

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
from prepare.sweep.locks import Lock, claim, is_held
from prepare.sweep.manifest import (
    SweepManifest,
    is_running,
    job_lock,
    make_folder,
    read_sweep_manifest,
    sweep_lock,
    write_sweep_manifest,
)

# Seconds that stopped jobs have to end.
_PATIENCE = 4.0


class Coordinator:
    """Leads the sweep in `folder` until `end`; the workers of a sweep go on as long as it is led.

    A new sweep has its folder for itself, and replaces an older one only with `overwrite`. With `resume`
    a command line continues the sweep that is there, and shares the folder with others that continue
    the same rows.

    Raises:
        ConfigError: another sweep is running in the folder, or its results are there.
        FileError: the folder cannot be used.
    """

    def __init__(
        self,
        folder: Path,
        *,
        rows: list[list[str]] | None,
        identities: list[str | None],
        resume: bool,
        overwrite: bool = False,
    ) -> None:
        make_folder(folder)
        self.folder = folder
        try:
            self._lock = Lock(sweep_lock(folder))
        except OSError as error:
            raise unusable(folder, error, "hydra.sweep.dir") from error
        try:
            self.manifest = self._begin(rows, identities, resume=resume, overwrite=overwrite)
        except BaseException:
            self._lock.close()
            raise

    def _begin(
        self,
        rows: list[list[str]] | None,
        identities: list[str | None],
        *,
        resume: bool,
        overwrite: bool,
    ) -> SweepManifest:
        alone = self._lock.acquire()
        if not alone and not (resume and self._lock.acquire(shared=True, patience=_PATIENCE)):
            raise self._busy("another sweep", ", or share its work with resume=true")
        if not (resume or overwrite) and (self.folder / "sweep.json").exists():
            wrong = f"{files.printable_path(self.folder)} holds another sweep"
            remedy = "choose another folder, or add resume=true to run what is missing, or "
            raise ConfigError("hydra.sweep.dir", wrong, f"{remedy}overwrite=true")
        before = read_sweep_manifest(self.folder) if resume else None
        if not alone:
            if before is None or before.identities != identities:
                raise self._busy("a sweep with other rows")
            return before
        manifest = SweepManifest(before.sweep if before else secrets.token_hex(8), rows, identities)
        write_sweep_manifest(self.folder, manifest)
        if not self._lock.acquire(shared=True):
            raise self._busy("another sweep")
        if not is_held(sweep_lock(self.folder)):
            # This file system has no locks: workers cannot see whether the sweep goes on.
            manifest = replace(manifest, host="")
            write_sweep_manifest(self.folder, manifest)
        return manifest

    def _busy(self, what: str, other: str = "") -> ConfigError:
        wrong = f"{what} is running in {files.printable_path(self.folder)}"
        return ConfigError(
            "hydra.sweep.dir", wrong, f"wait for it, or choose another folder{other}"
        )

    def running_elsewhere(self) -> int:
        """Return the number of rows that other processes are executing now."""
        return sum(is_running(self.folder, identity) for identity in self.manifest.identities)

    def end(self, *, stopped: bool) -> None:
        """Wait for the jobs that still run, and write a result for every job that began and has none.

        If the sweep was `stopped`, its workers get a request to end, and a few seconds for it.
        """
        if stopped:
            self._lock.close()
        try:
            self._wait(_PATIENCE if stopped else float("inf"))
            self._reconcile(stopped=stopped)
        finally:
            self._lock.close()

    def _wait(self, patience: float) -> None:
        deadline = time.monotonic() + patience
        for identity in self.manifest.identities:
            if identity is not None:
                remaining = max(0.0, deadline - time.monotonic())
                is_held(job_lock(self.folder, identity), patience=remaining)

    def _reconcile(self, *, stopped: bool) -> None:
        lost = Result("crashed", "lost", "its process ended without a result: killed?")
        if stopped:
            lost = Result("interrupted", "interrupted", "its sweep was stopped")
        for record, job in self._begun():
            lock = job_lock(self.folder, job.identity) if job.identity else None
            with claim(lock) as claimed, suppress(FileError):
                if claimed and record.result() is None:
                    write_result(Outcome(lost, FAILED), record)

    def _begun(self) -> Iterator[tuple[Record, Job]]:
        for path in sorted(self.folder.rglob("job.json")):
            record = Record(path.parent)
            with suppress(FileError):
                job = record.job()
                if job and self.manifest.number(job) is not None:
                    yield record, job
