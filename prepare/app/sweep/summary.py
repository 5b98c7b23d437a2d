"""The rows of a sweep, read from the files they left: which were planned, which ran, and their results."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from prepare.app.job.record import Record, without_result
from prepare.app.sweep.leader import is_led
from prepare.app.sweep.manifest import SweepManifest, read_sweep_manifest
from prepare.app.sweep.ranking import rank
from prepare.core.utils import files
from prepare.errors import FileError, PrepareError
from prepare.stages.stage import DONE, FAILED, NOT_VERIFIED

# Statuses of jobs that have not ended, and so have not succeeded either.
UNENDED = ("running", "waiting")
_KILLED = "it ended without a result: killed"
_NUMBER = re.compile(r"\d{1,9}")
_NOT_DONE = ("failed", "crashed", "interrupted", *UNENDED)


@dataclass(frozen=True)
class SweepRow:
    """One row of a sweep; None is for what is not known.

    `overrides` are as given, `choices` the same by key. `shared` says that other jobs ran on the same
    cores at the time, so that its timings cannot be compared.
    """

    number: int
    choices: dict[str, str]
    status: str
    seconds: float | None = None
    reason: str | None = None
    folder: str | None = None
    overrides: tuple[str, ...] = ()
    shared: bool = False
    figures: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Summary:
    """Every row that was planned or executed, by number; `varying` are the keys whose choices differ.

    `command` is the command line of the sweep.
    """

    rows: list[SweepRow]
    varying: list[str]
    command: str = ""

    def exit_code(self) -> int:
        """Return that of a row that is not done, failed or crashed; else of one that failed verification."""
        statuses = {row.status for row in self.rows}
        if statuses & set(_NOT_DONE):
            return FAILED
        return NOT_VERIFIED if "verification_failed" in statuses else DONE


def read_summary(folder: Path) -> Summary:
    """Read the rows of the sweep in `folder`.

    Raises:
        FileError: the folder is not that of a sweep.
    """
    manifest = read_sweep_manifest(folder)
    if manifest is None:
        if error := without_result(folder):
            raise error
        wrong = "is not the folder of a sweep"
        raise FileError(files.printable_path(folder), wrong, "give a folder under multirun/")
    records, live = _records(folder, manifest), is_led(folder)
    rows = [
        _row(number, overrides, records.get(number), folder, live=live)
        for number, overrides in enumerate(manifest.rows)
    ]
    keys = dict.fromkeys(key for row in rows for key in row.choices)
    varying = [key for key in keys if len({row.choices.get(key) for row in rows}) > 1]
    return Summary(rows, varying, manifest.command)


def _records(folder: Path, manifest: SweepManifest) -> dict[int, Record]:
    """Return the newest record of each row that has begun, by number; older sweeps are left out."""
    records: dict[int, Record] = {}
    for path in sorted(folder.rglob("job.json"), key=lambda path: path.lstat().st_mtime_ns):
        record = Record(path.parent)
        try:
            job = record.job()
            number = manifest.number(job) if job else None
        except FileError:  # its row says so
            digits = _NUMBER.match(path.parent.name)
            number = int(digits[0]) if digits else None
        if number is not None:
            records[number] = record
    return records


def _row(
    number: int, overrides: list[str], record: Record | None, folder: Path, *, live: bool
) -> SweepRow:
    status, reason = ("waiting", None) if live else ("interrupted", "it never started")
    row = SweepRow(number, choices_of(overrides), status, reason=reason, overrides=(*overrides,))
    if record is None:
        return row
    status, reason = ("running", None) if live else ("crashed", _KILLED)
    row = replace(row, folder=record.folder.relative_to(folder).as_posix())
    try:
        job, result = record.job(), record.result()
    except PrepareError as error:
        return replace(row, status="crashed", reason=str(error))
    row = replace(row, status=status, reason=reason, shared=bool(job and job.shared))
    if result is None:
        return row
    row = replace(row, status=result.status, reason=result.error or result.reason)
    return replace(row, seconds=result.seconds, figures=result.figures or {})


def choices_of(overrides: list[str]) -> dict[str, str]:
    """Split `memfmt=channels_last` into a key and a value; `~key` has no value."""
    pairs = (override.partition("=") for override in overrides)
    return {key.lstrip("+"): value for key, _, value in pairs if not key.startswith("hydra")}


def read(folder: str | Path) -> list[dict[str, Any]]:
    """Return the rows of the sweep in `folder` as records, also while it runs; nothing is written.

    A record has `number`, `status`, `best` and `shared` (booleans), `seconds`, `reason`, `folder` (the path
    of its run), every override under its key as the text that was given, and every figure of its result,
    such as `time_ratio` (below 1 is faster), `prepared_seconds`, `bytes_after` and `verified_error`. All have
    the same keys: what a row does not have is None. `pandas.DataFrame(read(folder))` is a table of them.

    Raises:
        FileError: `folder` is not that of a sweep.
    """
    folder = Path(folder)
    summary = read_summary(folder)
    best = rank(summary).best
    keys = dict.fromkeys(key for row in summary.rows for key in (*row.choices, *row.figures))
    plain = ("number", "status", "shared", "seconds", "reason")
    return [
        {
            **dict.fromkeys(keys),
            **row.figures,
            **row.choices,
            **{name: getattr(row, name) for name in plain},
            "best": row.number in best,
            "folder": row.folder and str(folder / row.folder),
        }
        for row in summary.rows
    ]
