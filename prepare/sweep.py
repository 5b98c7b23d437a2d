"""The rows of a sweep, from the files they left: which were planned, which ran, and how each ended."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prepare import files
from prepare.errors import FileError, PrepareError
from prepare.record import Record, unusable

SWEEP, VERSION = "prepare.sweep", 1
CONVOLUTIONS = ("converted", "already", "skipped", "ineffective")
_BAD = ("failed", "crashed", "interrupted")


@dataclass(frozen=True)
class Row:
    """One run of a sweep; what is not known is None. `choices` are the overrides it was given."""

    number: int
    choices: dict[str, str]
    status: str
    convolutions: dict[str, int] | None
    bytes_before: int | None
    bytes_after: int | None
    seconds: float | None
    reason: str | None
    folder: str | None


@dataclass(frozen=True)
class Summary:
    """Every row that was planned or found, by number; `varying` are the choices that differ."""

    rows: list[Row]
    varying: list[str]

    def exit_code(self) -> int:
        """1 if any row failed, crashed or was interrupted; else 3 if any failed verification; else 0."""
        statuses = {row.status for row in self.rows}
        if statuses & set(_BAD):
            return 1
        return 3 if "verification_failed" in statuses else 0


def write_planned(folder: Path, sweep: str, rows: list[list[str]] | None) -> None:
    """Notes which rows a sweep is to have, so that a missing one can be told; None if not known."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unusable(folder, error, "hydra.sweep.dir") from error
    files.write_json(
        folder / "sweep.json",
        {"format": SWEEP, "version": VERSION, "sweep": sweep, "rows": rows},
    )


def sweep_of(folder: Path) -> str | None:
    """The name of the sweep that runs in this folder, or None."""
    data = _planned(folder)
    return data and data["sweep"]


def read_summary(folder: Path) -> Summary:
    """The rows of the sweep in `folder`.

    Raises:
        FileError: it is no folder of a sweep.
    """
    planned = _planned(folder)
    found = _found(folder, planned and planned["sweep"])
    if planned is None and not found:
        raise FileError(files.shown(folder), "is no folder of a sweep", "give one under multirun/")
    rows = (planned and planned["rows"]) or []
    numbers = sorted({*range(len(rows)), *found})
    overrides = {number: rows[number] for number in range(len(rows))}
    made = [
        _row(number, overrides.get(number, []), found.get(number), folder) for number in numbers
    ]
    keys = dict.fromkeys(key for row in made for key in row.choices)
    varying = [key for key in keys if len({row.choices.get(key) for row in made}) > 1]
    return Summary(made, varying)


def _planned(folder: Path) -> dict[str, Any] | None:
    path = folder / "sweep.json"
    if not path.is_file():
        return None
    try:
        data = json.loads(files.read_text(path, limit=1 << 28))
        if data["format"] == SWEEP and data["version"] == VERSION and data["sweep"]:
            return {"sweep": data["sweep"], "rows": data["rows"]}
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    raise FileError(files.shown(path), "is no list of a sweep's rows", "remove it")


def _found(folder: Path, sweep: str | None) -> dict[int, Record]:
    """The rows of this sweep that have begun, by number; those of an older one are left out."""
    found = {}
    for path in sorted(folder.rglob("job.json")):
        record = Record(path.parent)
        with suppress(FileError):  # what cannot be read is no row of this sweep
            job = record.job()
            if job and job.number is not None and sweep in (None, job.sweep):
                found[job.number] = record
    return found


def _row(number: int, planned: list[str], record: Record | None, folder: Path) -> Row:
    if record is None:
        never = "it never started"
        return Row(number, _choices(planned), "interrupted", None, None, None, None, never, None)
    audit = None
    status, reason, seconds = "crashed", "it ended without a result: killed, or still running", None
    try:
        if result := record.result():
            status, reason, seconds = result.status, result.error, result.seconds
        audit = record.audit_summary()
    except PrepareError as error:
        status, reason = "crashed", str(error)
    job = record.job()
    return Row(
        number,
        _choices(planned or (job.overrides if job else [])),
        status,
        audit and {word: audit["convolutions"].get(word, 0) for word in CONVOLUTIONS},
        audit and audit["bytes_before"],
        audit and audit["bytes_after"],
        seconds,
        reason,
        record.folder.relative_to(folder).as_posix(),
    )


def _choices(overrides: list[str]) -> dict[str, str]:
    """`memfmt=channels_last` as a key and a value; `~key` has none."""
    pairs = (override.partition("=") for override in overrides)
    return {key.lstrip("+"): value for key, _, value in pairs if not key.startswith("hydra.")}
