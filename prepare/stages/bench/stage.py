"""The stage `bench`: is the prepared model faster than the unprepared one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from prepare.core.utils.text import finite
from prepare.stages.stage import Level, Seconds, Stage, StageContext, key, stage

if TYPE_CHECKING:
    from prepare.core.document import Document, ReportContext
    from prepare.stages.bench.records import Comparison


@stage("bench")
class BenchStage(Stage):
    """The paired timing of the prepared model against the unprepared one."""

    noun: ClassVar[str] = "timing"
    order: ClassVar[int] = 50
    default: ClassVar[bool] = True
    imports: ClassVar[tuple[str, ...]] = ("prepare.stages.bench.time_prepared",)
    groups: ClassVar[bool] = True
    fails: ClassVar[tuple[str, ...]] = ("slower",)

    level: Level = key("short", "time against the unprepared model")
    seconds: Seconds = key(None, "seconds that it may use; null: 3, or 120 for slow calls", "60")

    @classmethod
    def records(cls) -> Mapping[str, Any]:
        from prepare.stages.bench.records import Comparison

        return {"bench.json": Comparison}

    def longest(self, work: StageContext) -> float:
        if self.level == "none" or work.reference is None or isinstance(work.reference, str):
            return 0.0
        from prepare.stages.bench.time_prepared import BUDGET

        # Three calls of each of two models, and three rounds of three, if those are slow.
        return max(self.seconds or BUDGET, 15 * work.step_seconds())

    def run(self, work: StageContext) -> Mapping[str, Any]:
        if self.level == "none" or work.reference is None:
            return {}
        from prepare.stages.bench.time_prepared import time_models

        reference = work.reference
        if isinstance(reference, str) and "verify" in work.found:
            reference = "there is no second model, see above"
        with work.progress("timing it against the unprepared model") as tell:
            found = time_models(
                reference,
                work.model,
                work.pipeline,
                work.example,
                mode=work.settings.mode,
                seconds=self.seconds,
                amp=work.amp,
                tell=tell or (lambda _: None),
            )
        if note := _sweep_note(work, found):
            work.notes.append(note)
        return {"bench": found}

    @classmethod
    def failure(cls, word: str, found: Mapping[str, Any]) -> str:
        from prepare.stages.bench.document import speed_sentence

        bench = found.get("bench")
        return speed_sentence(bench) if bench and bench.headline.verdict == word else ""

    @classmethod
    def figures(cls, found: Mapping[str, Any]) -> dict[str, Any]:
        bench = found.get("bench")
        return {} if bench is None else _figures(bench)

    @classmethod
    def document(cls, shown: ReportContext) -> Document | None:
        from prepare.stages.bench.document import bench_document

        return bench_document(shown)


def _sweep_note(work: StageContext, found: Comparison) -> str:
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


def _figures(found: Comparison) -> dict[str, Any]:
    row = found.headline
    low, high = row.ratio_interval or (None, None)
    values: dict[str, Any] = {
        "timed": found.what,
        "verdict": row.verdict,
        "time_ratio": finite(row.ratio),
        "time_ratio_low": finite(low),
        "time_ratio_high": finite(high),
        "prepared_seconds": finite(found.prepared_seconds),
        "timed_reason": row.reason,
        "timed_where": _where(found),
        "busy": found.busy,
    }
    if found.rows:
        seconds = found.row(found.baseline).seconds
        values |= {"unprepared_seconds": finite(seconds), "rounds": found.repeats}
    return values


def _where(found: Comparison) -> str:
    """Describe the machine, what torch uses of it, and the device of the baseline."""
    if not found.rows:
        return ""
    env, amp = found.environment, found.settings.get("amp", "none")
    parts = [env.get("cpu"), env.get("platform"), *(env.get("devices") or [])]
    parts += [f"torch {env.get('torch')}", f"{found.settings.get('threads')} threads"]
    # Each row is compared with the unprepared model under the same autocast.
    parts += ["" if amp == "none" else f"autocast to {amp}"]
    parts.append(f"baseline on {found.row(found.baseline).device}")
    return "; ".join(str(part) for part in parts if part)
