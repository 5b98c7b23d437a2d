"""The rows of a sweep, from the files they left: which were planned, which ran, and how each ended."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from prepare.core.utils import files
from prepare.errors import FileError, PrepareError
from prepare.job.headline import Headline, headline
from prepare.job.record import Record
from prepare.sweep.locks import held
from prepare.sweep.manifest import Planned, is_running, read_planned, sweep_lock

# What a sweep that has not ended is doing, or will do: no end, so no success either.
UNENDED = ("running", "waiting")
_BAD = ("failed", "crashed", "interrupted", *UNENDED)


@dataclass(frozen=True)
class Row:
    """One run of a sweep; what is not known is None. `overrides` are as given, `choices` the same by key.

    `shared` says that others ran on the same cores at the time, so that what was timed is no measure.
    """

    number: int
    choices: dict[str, str]
    status: str
    seconds: float | None = None
    reason: str | None = None
    folder: str | None = None
    overrides: tuple[str, ...] = ()
    shared: bool = False
    found: Headline = field(default_factory=Headline)


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


def read_summary(folder: Path) -> Summary:
    """The rows of the sweep in `folder`.

    Raises:
        FileError: it is no folder of a sweep.
    """
    planned = read_planned(folder)
    found = _found(folder, planned)
    if planned is None and not found:
        raise FileError(
            files.printable_path(folder), "is no folder of a sweep", "give one under multirun/"
        )
    rows = (planned and planned.rows) or []
    numbers = sorted({*range(len(rows)), *found})
    overrides = {number: rows[number] for number in range(len(rows))}
    live = held(sweep_lock(folder))
    made = [
        _row(number, overrides.get(number, []), found.get(number), folder, live=live)
        for number in numbers
    ]
    keys = dict.fromkeys(key for row in made for key in row.choices)
    varying = [key for key in keys if len({row.choices.get(key) for row in made}) > 1]
    return Summary(made, varying)


def _found(folder: Path, planned: Planned | None) -> dict[int, Record]:
    """The rows of this sweep that have begun, by number; those of an older one are left out."""
    found = {}
    for path in sorted(folder.rglob("job.json")):
        record = Record(path.parent)
        with suppress(FileError):  # what cannot be read is no row of this sweep
            job = record.job()
            number = job and (planned.number(job) if planned else job.number)
            if number is not None:
                found[number] = record
    return found


def _row(
    number: int, planned: list[str], record: Record | None, folder: Path, *, live: bool
) -> Row:
    if record is None:
        status, reason = ("waiting", None) if live else ("interrupted", "it never started")
        return Row(number, _choices(planned), status, reason=reason, overrides=(*planned,))
    found = Headline()
    status, reason, seconds = "crashed", "it ended without a result: killed", None
    job = record.job()
    if is_running(folder, job and job.identity):
        status, reason = "running", None
    try:
        if result := record.result():
            status, reason, seconds = result.status, result.error, result.seconds
        found = headline(record.folder)
    except PrepareError as error:
        status, reason = "crashed", str(error)
    overrides = planned or (job.overrides if job else [])
    return Row(
        number,
        _choices(overrides),
        status,
        seconds,
        reason,
        record.folder.relative_to(folder).as_posix(),
        overrides=(*overrides,),
        shared=bool(job and job.shared),
        found=found,
    )


def _choices(overrides: list[str]) -> dict[str, str]:
    """`memfmt=channels_last` as a key and a value; `~key` has none."""
    pairs = (override.partition("=") for override in overrides)
    return {key.lstrip("+"): value for key, _, value in pairs if not key.startswith("hydra.")}
