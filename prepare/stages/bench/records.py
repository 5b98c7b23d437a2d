"""The results of a bench as plain data; `bench.json` is written and read without torch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

from prepare.core.forward.workload import Size  # noqa: TC001  read at run time
from prepare.core.utils.json_records import JsonRecord, Kind, Readable, check_values
from prepare.core.utils.machine import busy_sentence, disturbance
from prepare.core.utils.numbers import Interval  # noqa: TC001  read at run time
from prepare.errors import BenchError
from prepare.stages.bench import statistics
from prepare.stages.bench.statistics import Estimate

# The names of the two variants that a job times.
UNPREPARED, PREPARED = "unprepared", "prepared"
VERDICTS = (
    "baseline",
    "faster",
    "slower",
    "no difference",  # the whole interval of the ratio is within 3 % of 1
    "unclear",  # none of these was shown; `reason` says why
    "failed",
    "not compared",  # the baseline itself failed, or nothing was timed; `reason` says why
)
# The verdict of earlier versions for what is now `no difference` or `unclear`.
_OLD_VERDICT = "no significant difference"
# The settings that reports read; older records have less.
_SETTINGS = {
    "train": bool | None,
    **dict.fromkeys(("threads", "batch_size", "cores_available"), int | None),
    **dict.fromkeys(("confidence", "others", "load_before", "stolen", "held_back"), float | None),
    **dict.fromkeys(("amp", "rest"), str | None),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantResult:
    """The result for one variant; unknown values are None.

    `seconds` is the median time of one call, and `ratio` the median of the ratios to the baseline per
    round (below 1 is faster), each with its interval. `throughput` is in items per second. `peak_bytes`
    is the peak memory of one call, without the model. `samples` are the seconds of a call in each round,
    each the mean of `calls` calls. `reason` says why the variant failed, or why its verdict is unclear.
    `repeats` says how many calls with the same input returned other values, if any did.
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
    repeats: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """The ratio of the baseline to itself (A/A), which shows the noise.

    A `noise` of 1.03 means that ratios between 1/1.03 and 1.03 are not significant. It is None if there
    were too few rounds for an interval; then no difference is significant.
    """

    ratio: float
    interval: Interval
    noise: float | None

    @classmethod
    def of(cls, ratio: Estimate) -> Control:
        """Return the control with this ratio."""
        return cls(ratio=ratio.value, interval=ratio.interval, noise=statistics.noise(ratio))


@dataclass(frozen=True, slots=True)
class Progress:
    """The state of a running bench; `precision` is that of the least precise ratio, None if unknown."""

    doing: str
    rounds: int
    seconds: float
    budget: float
    precision: float | None


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Comparison(Readable):
    """Variants timed against a baseline.

    `repeats` is the number of rounds, and `seconds` includes the warm-up. `aa` is the A/A control, None
    if the baseline failed. `settings` hold how it was measured, `environment` where, and `notes` what
    limits the result.

    Of a workload it is the weighted whole, see `bench.combine_sizes`: times and ratios of all calls
    together. `sizes` are then the comparisons of each `size`.
    """

    rows: tuple[VariantResult, ...]
    baseline: str
    aa: Control | None
    repeats: int
    seconds: float
    settings: dict[str, Any]
    environment: dict[str, Any]
    notes: tuple[str, ...] = ()
    size: Size | None = field(default=None, metadata={"late": True})
    sizes: tuple[Comparison, ...] = field(default=(), metadata={"late": True})

    @classmethod
    def merged(cls, found: Sequence[tuple[Size, Comparison]]) -> Comparison:
        """Return the weighted whole of the comparisons of all sizes."""
        return combine_sizes(found)

    @property
    def noise(self) -> float | None:
        """By what factor the baseline differed from itself; None if that is not known."""
        return self.aa.noise if self.aa else None

    def row(self, name: str) -> VariantResult:
        """Return the row of a variant; raise KeyError if there is no such variant."""
        return {row.name: row for row in self.rows}[name]

    def as_bench(self) -> Bench:
        """Return a bench with this as its only case."""
        train = self.settings.get("train")
        case = Case(what="training step" if train else "inference", comparison=self)
        mode = "train" if train else "eval"
        return Bench(level="", mode=mode, seconds=self.seconds, cases=(case,))

    def save(self, path: str | os.PathLike) -> None:
        """Write a `bench.json` with this as its only case, atomically. Raise FileError on failure."""
        self.as_bench().save(path)

    @classmethod
    def load(cls, path: str | os.PathLike) -> Comparison:
        """Read the comparison in the first case of a `bench.json`, without torch.

        Raises:
            BenchError: the file is not a bench, has another version, or nothing was compared.
        """
        case = Bench.load(path).cases[0]
        if case.comparison is None:
            raise BenchError(str(path), f"nothing was compared: {case.reason}")
        return case.comparison


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One kind of call that a job timed: `inference`, `inference of one sample` or `training step`.

    If `comparison` is None, `reason` says why.
    """

    what: str
    comparison: Comparison | None = None
    reason: str = ""

    @property
    def sizes(self) -> dict[Size, Case]:
        """The case of each size of a workload, named by it; empty for one size."""
        each = self.comparison.sizes if self.comparison else ()
        cases = ((c.size, f"{self.what}, {c.size.name}", c) for c in each if c.size)
        return {size: replace(self, what=what, comparison=c) for size, what, c in cases}

    @property
    def row(self) -> VariantResult:
        """The row of the prepared model; a row with the reason if nothing was compared."""
        if self.comparison is None:
            return VariantResult(name=PREPARED, verdict="not compared", reason=self.reason)
        baseline = self.comparison.row(self.comparison.baseline)
        row = next((row for row in self.comparison.rows if row is not baseline), baseline)
        return replace(row, reason=row.reason or baseline.reason)

    @property
    def seconds(self) -> float | None:
        """The time of the prepared model: its ratio times that of the unprepared, as a reader divides."""
        row = self.row
        if self.comparison is None or row.ratio is None:
            return row.seconds
        return row.ratio * (self.comparison.row(self.comparison.baseline).seconds or 0.0)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Bench(JsonRecord, Readable):
    """The content of `bench.json`: what a job timed, the prepared model against the unprepared one.

    `level` and `mode` are those of the job; a comparison saved by itself has an empty level. There is at
    least one case, and the first belongs to the mode, on the batch as given. `seconds` is the time of the
    whole bench.
    """

    KIND: ClassVar[Kind] = Kind("prepare.bench", 1, "a bench", "a bench.json", BenchError)

    level: str
    mode: str
    seconds: float
    cases: tuple[Case, ...]

    @classmethod
    def merged(cls, found: Sequence[tuple[Size, Bench]]) -> Bench:
        """Return one bench for those of all sizes: each kind of call as a weighted whole."""
        cases: dict[str, list[tuple[Size, Case]]] = {}
        for size, bench in found:
            for case in bench.cases:
                cases.setdefault(case.what, []).append((size, case))
        first, seconds = found[0][1], sum(bench.seconds for _, bench in found)
        return replace(first, seconds=seconds, cases=tuple(map(_merged, cases.values())))

    @property
    def headline(self) -> VariantResult:
        """The one row to show in a summary: that of the first case."""
        return self.cases[0].row

    @property
    def busy(self) -> str:
        """One sentence if the machine was busy while the job was timed; empty if not."""
        compared = (case.comparison for case in self.cases if case.comparison)
        return next(filter(None, (busy_sentence(c.settings, c.noise) for c in compared)), "")

    def as_read(self) -> Self:
        return replace(self, cases=tuple(map(_updated, self.cases)))

    def check(self) -> None:
        if not self.cases:
            raise ValueError("it has no cases")
        for case in self.cases:
            if case.comparison is None:
                continue
            for comparison in (case.comparison, *case.comparison.sizes):
                check_comparison(comparison)
                known = VERDICTS if comparison.size else (*VERDICTS, _OLD_VERDICT)
                for row in comparison.rows:
                    if row.verdict not in known:
                        raise ValueError(f"{row.verdict!r} is not a verdict")


def _merged(found: Sequence[tuple[Size, Case]]) -> Case:
    """Return the weighted whole of one kind of call; a size that was not compared is a row of it."""
    known = next((case.comparison for _, case in found if case.comparison), None)
    if known is None:
        size, case = found[0]
        return replace(case, reason=f"at {size.name}: {case.reason}")
    compared = [(size, case.comparison or _without(known, case.row)) for size, case in found]
    return replace(found[0][1], comparison=Comparison.merged(compared), reason="")


def _without(known: Comparison, row: VariantResult) -> Comparison:
    """Return the comparison of a size at which nothing was compared, under the conditions of another one."""
    rows = (VariantResult(name=known.baseline, verdict="baseline"), row)
    return replace(known, rows=rows, aa=None, repeats=0, seconds=0.0, notes=())


def check_comparison(comparison: Comparison) -> None:
    """Raise an error if a value has another type than its readers expect, or a ratio is not positive."""
    from prepare.core.utils.environment import check_environment

    check_values(comparison.settings, _SETTINGS)
    check_environment(comparison.environment)
    comparison.row(comparison.baseline)
    for row in comparison.rows:
        check_ratios(row.ratio, *(row.ratio_interval or ()))
    if comparison.aa is not None:
        check_ratios(comparison.aa.ratio, comparison.aa.noise, *(comparison.aa.interval or ()))


def check_ratios(*ratios: float | None) -> None:
    """Raise ValueError unless all ratios are positive or None."""
    for ratio in ratios:
        if ratio is not None and ratio <= 0:
            raise ValueError(f"{ratio} is not a ratio of times")


def _updated(case: Case) -> Case:
    """Replace the verdict of earlier versions."""
    if case.comparison is None:
        return case
    rows = tuple(
        replace(row, verdict=statistics.verdict(Estimate(row.ratio, row.ratio_interval), None))
        if row.verdict == _OLD_VERDICT and row.ratio is not None
        else row
        for row in case.comparison.rows
    )
    return replace(case, comparison=replace(case.comparison, rows=rows))


def combine_sizes(found: Sequence[tuple[Size, Comparison]]) -> Comparison:
    """Return the comparison of all calls together, each size as often as its weight says."""
    counted = [(size, comparison) for size, comparison in found if size.weight]
    compared = [comparison for _, comparison in counted]
    first = next((each for each in compared if disturbance(each.settings)), compared[0])
    control = _control(counted)
    names = set.intersection(*({row.name for row in each.rows} for each in compared))
    notes = {f"at {size.name}: {note}": None for size, each in found for note in each.notes}
    return replace(
        first,
        rows=tuple(_row(counted, row.name, control) for row in first.rows if row.name in names),
        aa=control,
        repeats=min(each.repeats for each in compared),
        seconds=sum(each.seconds for _, each in found),
        settings={**first.settings, "batch_size": None},
        notes=tuple(notes),
        sizes=tuple(replace(each, size=size) for size, each in found),
    )


def combined(estimates: Sequence[Estimate], amounts: Sequence[float]) -> Estimate:
    """Return the ratio of all calls together, from those of the sizes and the baseline's time in each.

    The interval adds up those of the sizes: if these are independent it is wider than needed.
    """
    parts = [amount / sum(amounts) for amount in amounts]

    def total(values: Sequence[float]) -> float:
        return sum(part * value for part, value in zip(parts, values, strict=True))

    known = [each.interval for each in estimates if each.interval]
    interval = None
    if len(known) == len(estimates):
        interval = (total([low for low, _ in known]), total([high for _, high in known]))
    return Estimate(total([each.value for each in estimates]), interval)


def _row(
    counted: Sequence[tuple[Size, Comparison]], name: str, control: Control | None
) -> VariantResult:
    rows = [each.row(name) for _, each in counted]
    missing = next((row for row in rows if row.seconds is None or row.ratio is None), None)
    reasons = [
        f"at {size.name}: {row.reason}"
        for (size, _), row in zip(counted, rows, strict=True)
        if row.reason and (missing is None or row is missing)
    ]
    peaks = [row.peak_bytes for row in rows if row.peak_bytes is not None]
    result = VariantResult(
        name=name,
        verdict=missing.verdict if missing else rows[0].verdict,
        device=rows[0].device,
        peak_bytes=max(peaks, default=None),
        reason=next(iter(reasons), ""),
        repeats=next((row.repeats for row in rows if row.repeats), ""),
    )
    if missing:
        return result
    times = [Estimate(row.seconds or 0.0, row.seconds_interval) for row in rows]
    spent = combined(times, [size.weight for size, _ in counted])
    result = replace(result, seconds=spent.value, seconds_interval=spent.interval)
    if result.verdict == "baseline":
        return replace(result, ratio=1.0)
    ratios = [Estimate(row.ratio or 0.0, row.ratio_interval) for row in rows]
    ratio = combined(ratios, _amounts(counted))
    verdict = statistics.verdict(ratio, control.noise if control else None)
    few = result.reason or "the intervals of the sizes together are too wide"
    return replace(
        result,
        verdict=verdict,
        ratio=ratio.value,
        ratio_interval=ratio.interval,
        reason=few if verdict == "unclear" else "",
    )


def _control(counted: Sequence[tuple[Size, Comparison]]) -> Control | None:
    controls = [each.aa for _, each in counted if each.aa]
    if len(controls) < len(counted):
        return None
    ratios = [Estimate(each.ratio, each.interval) for each in controls]
    return Control.of(combined(ratios, _amounts(counted)))


def _amounts(counted: Sequence[tuple[Size, Comparison]]) -> list[float]:
    """Return the time of the baseline in each size."""
    return [size.weight * (each.row(each.baseline).seconds or 0.0) for size, each in counted]
