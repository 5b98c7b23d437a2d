"""The document of a tuning: the fastest correct recipe, and why each other one lost."""

from __future__ import annotations

from dataclasses import replace

from prepare.core import document as parts
from prepare.core.document import FASTER, RIGHT, USE_RECIPE, Advice, Answer, Document
from prepare.core.utils import text as numbers
from prepare.core.utils.text import doubt, interval_text, plural, printable
from prepare.stages.tune.records import UNPREPARED, CandidateResult, Tuning

_NONE = "no recipe was shown to be right and faster"


def tune_document(shown: parts.ReportContext) -> Document | None:
    """Return what is shown of the tuning of a run; None if it had none."""
    tuning = shown.found.get("tune")
    if tuning is None:
        return None
    return Document(
        name="tune",
        title="Recipes",
        place=10,
        line=tune_sentence(tuning),
        head=f"tune ({tuning.last.what})",
        answers=(_faster(tuning), _right(tuning)),
        advice=(_advice(tuning),),
        parts=lambda: (
            parts.Text(text=f"{tune_sentence(tuning)}.", where="page"),
            _table(tuning),
            parts.Text(text=tuple(_notes(tuning)), kind="note"),
        ),
    )


def tune_sentence(tuning: Tuning) -> str:
    """Return one sentence: `channels_last is 1.3x faster, 163 instead of 214 ms; 3 of 6 recipes timed`."""
    said = [f"{tuning.winner} is {_speed(tuning)}", tuning.last.clock_remark]
    if tuning.winner == UNPREPARED:
        said = [f"{UNPREPARED}, as {_NONE}", tuning.last.busy]
    timed = sum(row.rounds > 0 for row in tuning.rows)
    counted = f"{timed} of {plural(len(tuning.rows), 'recipe')} timed"
    return "; ".join(filter(None, (*said, counted)))


def _speed(tuning: Tuning, *, confidence: float | None = 0.95) -> str:
    """Return how fast the winner is: `1.3x faster, 163 instead of 214 ms (95 % interval: ...)`."""
    row, before = tuning.row(tuning.winner), tuning.row(UNPREPARED).seconds
    time = None if row.ratio is None or before is None else row.ratio * before
    interval = row.ratio_interval
    return numbers.speed_text(row.verdict, row.ratio, interval, time=time, confidence=confidence)


def _faster(tuning: Tuning) -> Answer:
    row, clock = tuning.row(tuning.winner), tuning.last.clock_remark
    kind, answer, remark, line = "plain", "No recipe is shown to be faster", "", ""
    if row.name != UNPREPARED:
        kind, answer = "good", f"{row.name} is {_speed(tuning, confidence=None)}"
        between = interval_text(row.ratio_interval, row.verdict)
        line = "; ".join(filter(None, (f"{_speed(tuning)}, with {row.name}", clock)))
        remark = "; ".join(filter(None, (f"95 % interval: {between}", clock)))
    return Answer(FASTER, kind, answer, remark, line=line)


def _right(tuning: Tuning) -> Answer:
    if tuning.winner == UNPREPARED:
        return Answer(RIGHT, "plain", "Unchanged", "the model as it is")
    return Answer(RIGHT, "good", "Yes", _outputs(tuning.row(tuning.winner)))


def _advice(tuning: Tuning) -> Advice:
    if tuning.winner != UNPREPARED:
        return replace(USE_RECIPE, rank=65)
    return Advice(85, "plain", "Leave the model as it is", _NONE)


def _ranked(tuning: Tuning) -> list[CandidateResult]:
    """Return the winner, then the others from the fastest to the slowest, then those without a time."""
    return sorted(
        tuning.rows, key=lambda row: (row.name != tuning.winner, row.ratio is None, row.ratio or 0)
    )


def _table(tuning: Tuning) -> parts.Table:
    titles = "Recipe head, Result prose, Time number, Speed text, Interval text, Outputs text"
    rows = [_cells(row, tuning.row(UNPREPARED).seconds or 0.0) for row in _ranked(tuning)]
    return parts.Table(
        label="All recipes", columns=parts.columns(titles), rows=rows, most=len(rows)
    )


def _cells(row: CandidateResult, before: float) -> tuple[str, ...]:
    said = {"winner": "winner", "dropped": row.reason, "timed": row.reason}
    return (
        row.name,
        printable(said.get(row.status, f"{doubt(row.status)}: {row.reason}")),
        "" if row.ratio is None else numbers.seconds(row.ratio * before),
        numbers.verdict_text(row.verdict, row.ratio, row.ratio_interval),
        interval_text(row.ratio_interval, row.verdict),
        _outputs(row),
    )


def _outputs(row: CandidateResult) -> str:
    """Return what the verification found: `outputs at 2 % of the tolerance`."""
    part = numbers.part_of_tolerance(row.error, row.allowed)
    return doubt(row.verified) if part is None else f"outputs at {numbers.tolerance_text(part)}"


def _notes(tuning: Tuning) -> list[str]:
    last = tuning.last
    rounds = f"{plural(last.repeats, 'round')} at last, {numbers.seconds(tuning.seconds)} in all"
    return ["; ".join(filter(None, (rounds, numbers.noise_text(last.noise)))), *last.notes]
