"""Progress of a running sweep: a line for each job that has ended, and counts; in a pipe only failures."""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from prepare.app.job.record import KEPT, Job, Record, Result
from prepare.app.report.terminal import console
from prepare.core.utils.text import line, plural, printable
from prepare.errors import FileError

if TYPE_CHECKING:
    from rich.status import Status

    from prepare.app.sweep.manifest import SweepManifest

_FAILED = ("failed", "crashed")
# Scanning the folder takes time from the jobs: scan once a second, for at most a 50th of the time.
_SECONDS, _SHARE = 1.0, 50


class SweepProgress:
    """Watch the folder of a sweep from `start` to `stop`, independent of the launcher of its jobs."""

    def __init__(self, folder: Path, manifest: SweepManifest) -> None:
        self._folder, self._manifest = folder, manifest
        self._seen: dict[Path, int] = {}
        self._statuses: dict[int, str] = {}
        self._running, self._kept = 0, 0
        self._began = time.monotonic()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._spinner = ExitStack()
        self._status: Status | None = None

    def start(self) -> None:
        """Start to watch; print how many jobs an earlier sweep finished."""
        for number, _, result in self._new():
            if result.status in KEPT:
                self._statuses[number] = result.status
        self._kept = len(self._statuses)
        if self._kept:
            line(f"kept {plural(self._kept, 'finished run')}", errors=True)
        self._status = (
            self._spinner.enter_context(_live(self._counts())) if sys.stderr.isatty() else None
        )
        self._thread.start()

    def stop(self) -> None:
        """Print the jobs that have ended by now, and stop to watch."""
        self._end.set()
        if self._thread.ident is not None:  # None if an interrupt came before `start`
            self._thread.join()
        self._scan()
        self._spinner.close()

    def _watch(self) -> None:
        pause = 0.0
        while not self._end.wait(max(_SECONDS, pause)):
            start = time.monotonic()
            self._scan()
            pause = _SHARE * (time.monotonic() - start)

    def _scan(self) -> None:
        for number, job, result in sorted(self._new(), key=lambda ended: ended[0]):
            self._statuses[number] = result.status
            text = f"#{number} {' '.join(job.overrides)}: {result.status}, {result.seconds:.1f} s"
            if self._status:
                self._status.console.print(printable(text), soft_wrap=True)
            elif result.status in _FAILED:
                line(f"{printable(text)} ({self._counts()})", errors=True)
        if self._status:
            self._status.update(self._counts())

    def _counts(self) -> str:
        done, rows = len(self._statuses), self._manifest.rows
        statuses = list(self._statuses.values())
        counted = {
            "running": self._running,
            "failed": sum(status in _FAILED for status in statuses),
            "interrupted": statuses.count("interrupted"),
        }
        parts = [f"{done} of {len(rows)} done" if rows else f"{done} done"]
        parts += [f"{count} {word}" for word, count in counted.items() if count]
        if rows and self._kept < done < len(rows):
            each = (time.monotonic() - self._began) / (done - self._kept)
            parts.append(f"about {_time(each * (len(rows) - done))} left")
        return ", ".join(parts)

    def _new(self) -> list[tuple[int, Job, Result]]:
        """Return (number, job, result) of each row that has ended since the last scan."""
        self._running = 0
        ended: list[tuple[int, Job, Result]] = []
        for root, folders, names in os.walk(self._folder):
            if "job.json" not in names:
                continue
            folders.clear()
            record = Record(root)
            with suppress(FileError, OSError):
                if "result.json" not in names:
                    job = record.job()
                    self._running += bool(job and self._manifest.number(job) is not None)
                    continue
                # A repeated job writes a new file of the same name.
                stamp = os.stat(record.folder / "result.json").st_mtime_ns  # noqa: PTH116
                if self._seen.get(record.folder) == stamp:
                    continue
                job, result = record.job(), record.result()
                self._seen[record.folder] = stamp
                number = self._manifest.number(job) if job else None
                if job and result and number is not None:
                    ended.append((number, job, result))
        return ended


def _live(text: str) -> Status:
    return console(errors=True).status(text, spinner="line")


def _time(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes / 60:.1f} h"
