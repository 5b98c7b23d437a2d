"""The rows of a sweep, read from the files they left: which were planned, which ran, and their results."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from prepare.app.job.headline import Headline, headline
from prepare.app.job.outcome import DONE, FAILED, NOT_VERIFIED
from prepare.app.job.record import Record, without_result
from prepare.app.sweep.manifest import SweepManifest, is_led, is_running, read_sweep_manifest
from prepare.core.utils import files
from prepare.errors import FileError, PrepareError

if TYPE_CHECKING:
    from pathlib import Path

# Statuses of jobs that have not ended, and so have not succeeded either.
UNENDED = ("running", "waiting")
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
    headline: Headline = field(default_factory=Headline)
    figures: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Summary:
    """Every row that was planned or executed, by number; `varying` are the keys whose choices differ."""

    rows: list[SweepRow]
    varying: list[str]

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
    records = _records(folder, manifest)
    if manifest is None and not records:
        if error := without_result(folder):
            raise error
        wrong = "is not the folder of a sweep"
        raise FileError(files.printable_path(folder), wrong, "give a folder under multirun/")
    planned = dict(enumerate((manifest and manifest.rows) or []))
    live = is_led(folder)
    rows = [
        _row(number, planned.get(number, []), records.get(number), folder, live=live)
        for number in sorted({*planned, *records})
    ]
    keys = dict.fromkeys(key for row in rows for key in row.choices)
    varying = [key for key in keys if len({row.choices.get(key) for row in rows}) > 1]
    return Summary(rows, varying)


def _records(folder: Path, manifest: SweepManifest | None) -> dict[int, Record | FileError]:
    """Return the records of the rows that have begun, by number; those of an older sweep are left out.

    Where a `job.json` cannot be read, it is the error, by the number that begins the name of the folder.
    """
    records: dict[int, Record | FileError] = {}
    for path in sorted(folder.rglob("job.json")):
        record = Record(path.parent)
        try:
            job = record.job()
        except FileError as error:
            if digits := _NUMBER.match(path.parent.name):
                records.setdefault(int(digits[0]), error)
            continue
        if job is not None:
            number = manifest.number(job) if manifest else job.number
            if number is not None:
                records[number] = record
    return records


def _row(
    number: int, planned: list[str], record: Record | FileError | None, folder: Path, *, live: bool
) -> SweepRow:
    if not isinstance(record, Record):
        status, reason = ("waiting", None) if live else ("interrupted", "it never started")
        if record is not None:
            status, reason = "crashed", str(record)
        return SweepRow(number, _choices(planned), status, reason=reason, overrides=(*planned,))
    figures: dict[str, Any] = {}
    status, reason, seconds = "crashed", "it ended without a result: killed", None
    job = record.job()
    if job and is_running(folder, job.identity):
        status, reason = "running", None
    try:
        if result := record.result():
            status, reason, seconds = result.status, result.error or result.reason, result.seconds
            figures = result.figures or {}
    except PrepareError as error:
        status, reason = "crashed", str(error)
    overrides = planned or (job.overrides if job else [])
    return SweepRow(
        number,
        _choices(overrides),
        status,
        seconds,
        reason,
        record.folder.relative_to(folder).as_posix(),
        overrides=(*overrides,),
        shared=bool(job and job.shared),
        headline=headline(figures),
        figures=figures,
    )


def _choices(overrides: list[str]) -> dict[str, str]:
    """Split `memfmt=channels_last` into a key and a value; `~key` has no value."""
    pairs = (override.partition("=") for override in overrides)
    return {key.lstrip("+"): value for key, _, value in pairs if not key.startswith("hydra.")}
