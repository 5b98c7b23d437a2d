"""What a bench found, as plain data: saved to and loaded from `bench.json` without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from prepare.core.utils import json_records
from prepare.errors import BenchError

_KIND = json_records.Kind("prepare.bench", 1, "bench", "a bench.json", BenchError)
# What the two variants of a run are called.
UNPREPARED, PREPARED = "unprepared", "prepared"
VERDICTS = (
    "baseline",
    "faster",
    "slower",
    "no significant difference",
    "failed",
    "not compared",  # the baseline itself failed, or nothing was timed; `reason` says why
)
Interval = tuple[float, float] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One variant. What could not be found out is None.

    `seconds` is the median time of one call, `ratio` the median of the paired ratios to the baseline
    (below 1 is faster); each with its interval. `throughput` is items a second, `peak_bytes` the most
    that one call held beyond what was there before. `samples` are the seconds of a call in each
    round, each the mean of `calls` calls. `reason` says why it failed.
    """

    name: str
    verdict: str
    seconds: float | None = None
    seconds_interval: Interval = None
    ratio: float | None = None
    ratio_interval: Interval = None
    throughput: float | None = None
    peak_bytes: int | None = None
    device: str = ""
    calls: int = 0
    samples: tuple[float, ...] = ()
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """The baseline against itself (A/A): what a ratio is where nothing differs.

    `noise` 1.03 says that ratios between 1/1.03 and 1.03 are no significant difference. None where
    there were too few rounds for an interval: then nothing is significant.
    """

    ratio: float
    interval: Interval
    noise: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a bench is: `precision` is that of the least precise ratio, None before there is one."""

    doing: str
    rounds: int
    seconds: float
    budget: float
    precision: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Variants timed against a baseline.

    `repeats` rounds took `seconds`, warm-up and all. `aa` is None where the baseline failed.
    `settings` say how it was measured, `environment` where, and `notes` what to bear in mind.
    """

    rows: tuple[Row, ...]
    baseline: str
    aa: Control | None
    repeats: int
    seconds: float
    settings: dict[str, Any]
    environment: dict[str, Any]
    notes: tuple[str, ...] = ()

    def row(self, name: str) -> Row:
        """The row of that variant; KeyError where there is none."""
        return {row.name: row for row in self.rows}[name]

    def save(self, path: str | Path) -> None:
        """Writes a `bench.json` with this as its only case, whole or not at all. Raises FileError."""
        train = self.settings["train"]
        case = Case(what="training step" if train else "inference", comparison=self)
        mode = "train" if train else "eval"
        Bench(level="", mode=mode, seconds=self.seconds, cases=(case,)).save(path)

    @classmethod
    def load(cls, path: str | Path) -> Comparison:
        """The comparison in the first case of a `bench.json`; torch is not needed.

        Raises:
            BenchError: the file is no bench, or one of another version, or nothing was compared.
        """
        case = Bench.load(path).cases[0]
        if case.comparison is None:
            raise BenchError(str(path), f"nothing was compared: {case.reason}")
        return case.comparison


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One thing that a run timed: `inference`, `inference of one sample` or `training step`.

    Where there is no `comparison`, `reason` says why.
    """

    what: str
    comparison: Comparison | None = None
    reason: str = ""

    @property
    def row(self) -> Row:
        """The prepared model's; where nothing was compared, one that says so and why."""
        if self.comparison is None:
            return Row(name=PREPARED, verdict="not compared", reason=self.reason)
        baseline = self.comparison.row(self.comparison.baseline)
        found = next((row for row in self.comparison.rows if row is not baseline), baseline)
        return replace(found, reason=found.reason or baseline.reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """What a run timed, the prepared model against the unprepared one: its `bench.json`.

    `level` and `mode` are the run's; a comparison that was saved alone has no level. The first of the
    `cases`, of which there is at least one, is what the mode is about, on the batch as it is. All of
    it took `seconds`.
    """

    level: str
    mode: str
    seconds: float
    cases: tuple[Case, ...]

    @property
    def headline(self) -> Row:
        """The row to show where there is room for one: its `ratio`, `ratio_interval`, `verdict`, `reason`."""
        return self.cases[0].row

    def save(self, path: str | Path) -> None:
        """Writes `bench.json`, whole or not at all. Raises FileError."""
        json_records.write_json(path, _KIND.head | asdict(self), lines=True)

    @classmethod
    def load(cls, path: str | Path) -> Bench:
        """A run's bench from its JSON; torch is not needed.

        Raises:
            BenchError: the file is no bench, or one of another version.
        """
        return json_records.read_record(path, _KIND, _bench)


def _bench(data: Mapping[str, Any]) -> Bench:
    cases = [_record(Case, case) for case in data["cases"]]
    if not cases:
        raise ValueError("it holds no case")
    read = (replace(c, comparison=c.comparison and _comparison(c.comparison)) for c in cases)
    return Bench(cases=tuple(read), **{key: data[key] for key in ("level", "mode", "seconds")})


def _comparison(data: Mapping[str, Any]) -> Comparison:
    rows = tuple(_record(Row, row) for row in data["rows"])
    if unknown := {row.verdict for row in rows} - {*VERDICTS}:
        raise ValueError(f"no verdict is called {min(unknown)!r}")
    return Comparison(
        rows=rows,
        aa=None if data["aa"] is None else _record(Control, data["aa"]),
        settings=dict(data["settings"]),
        environment=dict(data["environment"]),
        notes=tuple(data["notes"]),
        **{key: data[key] for key in ("baseline", "repeats", "seconds")},
    )


def _record(kind: type, found: Mapping[str, Any]) -> Any:
    names = {field.name for field in fields(kind)}
    if names != found.keys():
        raise ValueError(f"a row holds {sorted(found)}, not {sorted(names)}")
    return kind(
        **{key: tuple(value) if isinstance(value, list) else value for key, value in found.items()}
    )
