"""The command that leads a sweep: it holds the folder, lists the rows, and gives each row a result."""

from __future__ import annotations

import platform
import secrets
import time
from contextlib import ExitStack, suppress
from pathlib import Path

from prepare.app.job.execute import Outcome, write_result
from prepare.app.job.record import Record, Result, unusable
from prepare.app.sweep.manifest import SweepManifest, read_sweep_manifest
from prepare.core.utils import files
from prepare.core.utils.files import hold_folder
from prepare.errors import ConfigError, FileError
from prepare.stages.stage import FAILED

# Launchers whose runs go on after the command that started them has ended.
OUTLIVE_COMMAND = ("submitit_slurm",)
# Launchers whose runs have ended when the command goes on.
_END_WITH_COMMAND = ("basic", "joblib")
# Seconds that stopped runs have to end, and between two looks.
_PATIENCE, _PAUSE = 4.0, 0.05


class Leader:
    """Leads the sweep in `folder` until `end`; its workers go on as long as it is led.

    A new sweep replaces an older one only with `overwrite`; `resume` continues the one that is there.

    Raises:
        ConfigError: another sweep is running in the folder, or its results are there.
        FileError: the folder cannot be used.
    """

    def __init__(
        self,
        folder: Path,
        *,
        rows: list[list[str]],
        identities: list[str],
        command: str,
        resume: bool,
        overwrite: bool = False,
    ) -> None:
        self.folder = folder
        shown = files.printable_path(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise unusable(folder, error, "hydra.sweep.dir") from error
        with ExitStack() as held:
            if not held.enter_context(hold_folder(folder)):
                wrong, remedy = "another sweep is running in", "wait for it, or choose another"
                raise ConfigError("hydra.sweep.dir", f"{wrong} {shown}", f"{remedy} folder")
            if (folder / "sweep.json").exists() and not (resume or overwrite):
                remedy = "choose another folder, or add resume=true to run what is missing, or"
                wrong = f"{shown} holds another sweep"
                raise ConfigError("hydra.sweep.dir", wrong, f"{remedy} overwrite=true")
            before = read_sweep_manifest(folder) if resume else None
            name = before.sweep if before else secrets.token_hex(8)
            host = platform.node() if is_led(folder) else ""  # no locks: nobody can see who leads
            self.manifest = SweepManifest(name, rows, identities, command, host)
            self.manifest.save(folder / "sweep.json")
            self._held = held.pop_all()

    def end(self, *, stopped: bool) -> None:
        """Write a result for every run that began and has none; `stopped` runs first get a moment to end."""
        self._held.close()  # the workers of a launcher see it, and stop
        lost = Result("crashed", "lost", "its process ended without a result: killed?")
        if stopped:
            lost = Result("interrupted", "interrupted", "its sweep was stopped")
            deadline = time.monotonic() + _PATIENCE
            while time.monotonic() < deadline and self._unended(_END_WITH_COMMAND):
                time.sleep(_PAUSE)
        for record in self._unended():
            with suppress(FileError):
                write_result(Outcome(lost, FAILED), record)

    def _unended(self, but: tuple[str, ...] = ()) -> list[Record]:
        """Return the records of runs that began and have no result, `but` for those of some launchers."""
        found, left_out = [], (*OUTLIVE_COMMAND, *but)
        for path in self.folder.rglob("job.json"):
            record = Record(path.parent)
            with suppress(FileError):
                job = record.job()
                ours = job and self.manifest.number(job) is not None
                if job and ours and job.launcher not in left_out and record.result() is None:
                    found.append(record)
        return found


def is_led(folder: Path) -> bool:
    """Return whether a command leads the sweep in `folder`; False where the system has no locks."""
    with hold_folder(folder) as free:
        return not free


def stamp(folder: Path) -> int | None:
    """Return what changes when another command begins to lead the sweep; None where nobody leads it."""
    with suppress(OSError):
        stamped = (folder / "sweep.json").stat().st_mtime_ns
        return stamped if is_led(folder) else None
    return None
