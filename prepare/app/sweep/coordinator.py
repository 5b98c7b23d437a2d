"""The command line's part in a sweep: take its folder, wait for its jobs, and give each a result."""

from __future__ import annotations

import secrets
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from prepare.app.job.outcome import FAILED, Outcome, write_result
from prepare.app.job.record import Job, Record, Result, leads_out, unusable
from prepare.app.sweep.locks import Claim, ClaimLost, claim, is_held
from prepare.app.sweep.manifest import (
    SweepManifest,
    is_running,
    job_claim,
    leaders,
    manifest_claim,
    names_in,
    read_sweep_manifest,
    write_sweep_manifest,
)
from prepare.core.utils import files
from prepare.core.utils.folders import ask_server
from prepare.errors import ConfigError, FileError, raise_problems

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# Seconds that stopped jobs have to end.
_PATIENCE = 4.0
# Seconds to wait for others that decide on the rows, one of which may have died doing so.
_TURN = 120.0


class Coordinator:
    """Leads the sweep in `folder` until `end`; the workers of a sweep go on as long as it is led.

    A new sweep has its folder for itself, and replaces an older one only with `overwrite`. With `resume`
    a command line continues the sweep that is there, and shares the folder with others that continue
    the same rows.

    Raises:
        ConfigError: another sweep is running in the folder, its results are there, or a link leads out of it.
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
        self.folder = folder
        raise_problems(ConfigError, leads_out(folder, "hydra.sweep.dir", sweep=True))
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lead = Claim(leaders(folder) / secrets.token_hex(8))
            try:
                with claim(manifest_claim(folder), patience=_TURN) as turn:
                    if not turn:
                        raise ClaimLost
                    self._lead.acquire()  # not before: who decides now would see it, and be refused
                    self.manifest = self._begin(
                        rows, identities, resume=resume, overwrite=overwrite
                    )
            except BaseException:
                self._lead.close()
                raise
        except OSError as error:
            raise unusable(folder, error, "hydra.sweep.dir") from error
        except ClaimLost:
            raise self._busy("another sweep") from None

    def _begin(
        self,
        rows: list[list[str]] | None,
        identities: list[str | None],
        *,
        resume: bool,
        overwrite: bool,
    ) -> SweepManifest:
        ask_server(self.folder)
        exists = (self.folder / "sweep.json").exists()
        before = read_sweep_manifest(self.folder) if resume else None
        same = before is not None and before.identities == identities
        if any(map(is_held, self._others())):
            if before is not None and same:
                return before
            if resume:
                raise self._busy("a sweep with other rows")
            raise self._busy("another sweep", ", or share its work with resume=true")
        if exists and not (resume or overwrite):
            wrong = f"{files.printable_path(self.folder)} holds another sweep"
            remedy = "choose another folder, or add resume=true to run what is missing, or "
            raise ConfigError("hydra.sweep.dir", wrong, f"{remedy}overwrite=true")
        # The same rows need no certainty: it would do no harm if another command line shared them.
        if not same:
            for other in self._others():
                with claim(other) as dead:
                    if not dead:
                        raise self._busy("another sweep")
        manifest = SweepManifest(before.sweep if before else secrets.token_hex(8), rows, identities)
        write_sweep_manifest(self.folder, manifest)
        return manifest

    def _others(self) -> list[Path]:
        """Return the claims of other command lines that lead this sweep, or died when they did."""
        return [name for name in names_in(leaders(self.folder)) if name != self._lead.path]

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
            self._lead.close()
        try:
            self._wait(_PATIENCE if stopped else float("inf"))
            # A row that seemed lost may be claimed anew in the meantime, by a command that then does it.
            while self._reconcile(stopped=stopped) and not stopped:
                self._wait(float("inf"))
        finally:
            self._lead.close()

    def _wait(self, patience: float) -> None:
        deadline = time.monotonic() + patience
        for identity in self.manifest.identities:
            if identity is not None:
                remaining = max(0.0, deadline - time.monotonic())
                is_held(job_claim(self.folder, identity), patience=remaining)

    def _reconcile(self, *, stopped: bool) -> bool:
        """Write the result of each job that began and has none; return whether another process does one."""
        others = False
        lost = Result("crashed", "lost", "its process ended without a result: killed?")
        if stopped:
            lost = Result("interrupted", "interrupted", "its sweep was stopped")
        for record, job in self._begun():
            name = job_claim(self.folder, job.identity) if job.identity else None
            with suppress(FileError, ClaimLost):
                if record.result() is not None:
                    continue
                # Who stops a sweep has no time to watch a process of another machine.
                with claim(name, watch=not stopped) as held:
                    if held and record.result() is None:
                        write_result(Outcome(lost, FAILED), record)
                others |= not held
        return others

    def _begun(self) -> Iterator[tuple[Record, Job]]:
        for path in sorted(self.folder.rglob("job.json")):
            record = Record(path.parent)
            with suppress(FileError):
                job = record.job()
                if job and self.manifest.number(job) is not None:
                    yield record, job
