"""Progress of a running sweep: a line for each job that has ended, and counts; in a pipe only failures."""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prepare.app.job.record import KEPT, Job, Record, Result
from prepare.app.report.terminal import console
from prepare.core.utils.text import line, plural, printable
from prepare.errors import FileError

if TYPE_CHECKING:
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
        self._kept = 0
        self._began = time.monotonic()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._spinner = ExitStack()
        self._status: Any = None

    def start(self) -> None:
        """Start to watch; print how many jobs an earlier sweep finished."""
        ended = self._new()
        self._statuses = {n: result.status for n, _, result in ended if result.status in KEPT}
        self._kept = len(self._statuses)
        if self._kept:
            line(f"kept {plural(self._kept, 'finished run')}", errors=True)
        if sys.stderr.isatty():
            spinner = console(errors=True).status(self._counts(), spinner="line")
            self._status = self._spinner.enter_context(spinner)
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
        done, rows = len(self._statuses), len(self._manifest.rows)
        found = Counter("failed" if s in _FAILED else s for s in self._statuses.values())
        parts = [f"{done} of {rows} done" if rows else f"{done} done"]
        parts += [f"{found[word]} {word}" for word in ("failed", "interrupted") if found[word]]
        if self._kept < done < rows:
            each = (time.monotonic() - self._began) / (done - self._kept)
            parts.append(f"about {remaining(each * (rows - done))} left")
        return ", ".join(parts)

    def _new(self) -> list[tuple[int, Job, Result]]:
        """Return (number, job, result) of each row that has ended since the last scan."""
        ended: list[tuple[int, Job, Result]] = []
        for path in self._folder.rglob("result.json"):
            with suppress(FileError, OSError):
                # A repeated job writes a new file of the same name.
                stamp, record = path.stat().st_mtime_ns, Record(path.parent)
                if self._seen.get(path) != stamp and (job := record.job()):
                    self._seen[path] = stamp
                    number, result = self._manifest.number(job), record.result()
                    if result and number is not None:
                        ended.append((number, job, result))
        return ended


def remaining(seconds: float) -> str:
    """Return a time that is left, in rounded units."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes / 60:.1f} h"
