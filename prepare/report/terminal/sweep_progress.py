"""What a sweep says while it runs: a line for every job that has ended, and how far it is."""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from prepare.core.utils.text import line, plural, printable
from prepare.errors import FileError
from prepare.job.record import KEPT, Job, Record, Result
from prepare.report.terminal.console import console

if TYPE_CHECKING:
    from rich.console import Console
    from rich.status import Status

    from prepare.sweep.manifest import Planned

_FAILED = ("failed", "crashed", "interrupted")
# Looking costs time that the jobs could use: it is done this often, and for less than a 50th of it.
_EVERY, _SHARE = 1.0, 50


class Progress:
    """Watches the folder of a sweep, whoever runs its jobs, from `start` to `stop`."""

    def __init__(self, folder: Path, planned: Planned) -> None:
        self._folder, self._planned = folder, planned
        self._seen: dict[Path, int] = {}
        self._statuses: dict[int, str] = {}
        self._running, self._kept = 0, 0
        self._began = time.monotonic()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._shown, self._status = ExitStack(), None

    def start(self) -> None:
        """Begins to watch; says what is done already."""
        for number, _, result in self._new():
            if result.status in KEPT:
                self._statuses[number] = result.status
        if kept := len(self._statuses):
            line(f"{plural(kept, 'run')} of before kept", errors=True)
        self._kept = len(self._statuses)
        self._status = self._shown.enter_context(_live()) if sys.stderr.isatty() else None
        self._thread.start()

    def stop(self) -> None:
        """Says what has ended by now, and watches no more."""
        self._end.set()
        if self._thread.ident is not None:  # else an interrupt came before it was started
            self._thread.join()
        self._look()
        self._shown.close()

    def _watch(self) -> None:
        pause = 0.0
        while not self._end.wait(max(_EVERY, pause)):
            start = time.monotonic()
            self._look()
            pause = _SHARE * (time.monotonic() - start)

    def _look(self) -> None:
        for number, job, result in sorted(self._new(), key=lambda row: row[0]):
            self._statuses[number] = result.status
            text = f"#{number} {' '.join(job.overrides)}: {result.status}, {result.seconds:.1f} s"
            self._say(printable(text) + ("" if self._status else f" ({self._far()})"))
        if self._status:
            self._status.update(self._far())

    def _say(self, text: str) -> None:
        if self._status:
            self._status.console.print(text, soft_wrap=True)
        else:
            line(text, errors=True)

    def _far(self) -> str:
        done, rows = len(self._statuses), self._planned.rows
        failed = sum(status in _FAILED for status in self._statuses.values())
        parts = [f"{done} of {len(rows)} done" if rows else f"{done} done"]
        parts += [
            f"{count} {word}"
            for count, word in ((self._running, "running"), (failed, "failed"))
            if count
        ]
        if rows and self._kept < done < len(rows):
            each = (time.monotonic() - self._began) / (done - self._kept)
            parts.append(f"about {_time(each * (len(rows) - done))} left")
        return ", ".join(parts)

    def _new(self) -> list[tuple[int, Job, Result]]:
        """The rows that have ended since the last time."""
        found, self._running = [], 0
        for root, folders, names in os.walk(self._folder):
            if "job.json" not in names:
                continue
            folders.clear()
            record = Record(root)
            with suppress(FileError, OSError):
                if "result.json" not in names:
                    job = record.job()
                    self._running += bool(job and self._planned.number(job) is not None)
                    continue
                # A new file, even of the same name, is another one.
                stamp = os.stat(record.folder / "result.json").st_mtime_ns  # noqa: PTH116
                if self._seen.get(record.folder) == stamp:
                    continue
                job, result = record.job(), record.result()
                self._seen[record.folder] = stamp
                number = job and self._planned.number(job)
                if result and number is not None:
                    found.append((number, job, result))
        return found


def _live() -> Status:
    out: Console = console(errors=True)
    return out.status("", spinner="line")


def _time(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes / 60:.1f} h"
