"""The stage `bench`: is the prepared model faster than the unprepared one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from prepare.core.utils.numbers import finite
from prepare.stages.registry import stage
from prepare.stages.stage import Level, Seconds, Stage, StageContext, key

if TYPE_CHECKING:
    from prepare.core.document import Document, ReportContext
    from prepare.stages.bench.records import Bench, Case, Comparison


@stage("bench")
class BenchStage(Stage):
    """The paired timing of the prepared model against the unprepared one."""

    noun: ClassVar[str] = "timing"
    order: ClassVar[int] = 50
    default: ClassVar[bool] = True
    imports: ClassVar[tuple[str, ...]] = ("prepare.stages.bench.time_prepared",)
    groups: ClassVar[bool] = True
    fails: ClassVar[tuple[str, ...]] = ("slower",)

    level: Level = key(
        "short", "time against the unprepared model (short: 10 s, 120 for slow calls)"
    )
    seconds: Seconds = key(None, "seconds that a timing may use; null: those of its level", "60")

    @classmethod
    def records(cls) -> Mapping[str, Any]:
        from prepare.stages.bench.records import Bench

        return {"bench.json": Bench}

    @classmethod
    def shows(cls) -> tuple[Any, ...]:
        from prepare.stages.bench.records import Bench, Comparison

        return Bench, Comparison

    @property
    def budget(self) -> float:
        """The seconds of one comparison; 0 if nothing is timed."""
        if self.level == "none":
            return 0.0
        from prepare.stages.bench.time_prepared import BUDGET

        return self.seconds or BUDGET[self.level]

    def longest(self, work: StageContext) -> float:
        if work.reference is None or isinstance(work.reference, str):
            return 0.0
        from prepare.stages.bench.time_prepared import time_limit

        is_short = self.level == "short" and self.seconds is None
        return time_limit(self.budget, work.step_seconds()) if is_short else self.budget

    def run(self, work: StageContext) -> Mapping[str, Any]:
        if self.level == "none" or work.reference is None:
            return {}
        from prepare.stages.bench.time_prepared import Models, time_models

        reference = work.reference
        if isinstance(reference, str) and "verify" in work.found:
            reference = "there is no second model, see above"
        with work.progress("timing it against the unprepared model") as tell:
            found = time_models(
                Models(unprepared=reference, prepared=work.model, pipeline=work.pipeline),
                work.example,
                level=self.level,
                mode=work.settings.mode,
                took=work.took,
                seconds=self.seconds,
                amp=work.amp,
                tell=tell or (lambda _: None),
            )
        if note := _sweep_note(work, found):
            work.notes.append(note)
        return {"bench": found}

    @classmethod
    def failure(cls, word: str, found: Mapping[str, Any]) -> str:
        from prepare.stages.bench.document import case_sentence

        bench = found.get("bench")
        return case_sentence(bench.cases[0]) if bench and bench.headline.verdict == word else ""

    @classmethod
    def figures(cls, found: Mapping[str, Any]) -> dict[str, Any]:
        bench = found.get("bench")
        if bench is None:
            return {}
        found = {"timed": bench.cases[0].what}
        for case in bench.cases:
            start = "" if case is bench.cases[0] else f"{case.what.replace(' ', '_')}_"
            found |= _figures(case, start)
        return found

    @classmethod
    def document(cls, shown: ReportContext) -> Document | None:
        from prepare.stages.bench.document import bench_document

        return bench_document(shown)


def _sweep_note(work: StageContext, found: Bench) -> str:
    """Return which sweep says what the precision and what the layout earned; empty if one did not change.

    A precision that a group has chosen can be swept over; one of a step or a recipe would stay in each row.
    """
    chosen = work.settings.choices.get("precision")
    tensors = work.plan.tensors
    changed = any(each.old.dtype != each.new.dtype for each in tensors) and any(
        each.old.stride != each.new.stride for each in tensors
    )
    if found.headline.ratio is None or not changed or chosen in (None, "float32"):
        return ""
    sweep = f"-m precision=float32,{chosen}"
    return f"precision and layout changed together; {sweep} says what each earned"


def _figures(case: Case, prefix: str) -> dict[str, Any]:
    """Return the figures of one case; the first has no prefix."""
    from prepare.core.utils.machine import disturbed_times

    row = case.row
    low, high = row.ratio_interval or (None, None)
    values: dict[str, Any] = {"verdict": row.verdict, "time_ratio": finite(row.ratio)}
    values |= {"time_ratio_low": finite(low), "time_ratio_high": finite(high)}
    values |= {"prepared_seconds": finite(case.seconds)}
    values |= {"timed_reason": row.reason, "timed_where": "", "busy": ""}
    if (comparison := case.comparison) is not None:
        baseline = comparison.row(comparison.baseline)
        busy = disturbed_times(comparison.settings, comparison.noise)
        values |= {"timed_where": _where(comparison), "busy": busy}
        values |= {"unprepared_seconds": finite(baseline.seconds)}
        values |= {"rounds": comparison.repeats}
    return {f"{prefix}{key}": value for key, value in values.items()}


def _where(comparison: Comparison) -> str:
    """Describe the machine, what torch uses of it, and the device of the baseline."""
    env, settings = comparison.environment, comparison.settings
    device = comparison.row(comparison.baseline).device
    parts = [env.get("cpu"), env.get("platform"), *(env.get("devices") or [])]
    parts += [f"torch {env.get('torch')}", f"{settings.get('threads')} threads"]
    # Each row is compared with the unprepared model under the same autocast.
    amp = settings.get("amp", "none")
    parts.append("" if amp == "none" else f"autocast to {amp}")
    return "; ".join(str(part) for part in [*parts, f"baseline on {device}"] if part)
