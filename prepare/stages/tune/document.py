"""The document of a tuning: the fastest correct recipe, and why each other one lost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from prepare.core.document import (
    FASTER,
    RIGHT,
    UNCLEAR,
    USE_RECIPE,
    Advice,
    Answer,
    Bar,
    Bars,
    Charts,
    Document,
    Folded,
    Items,
    Part,
    ReportContext,
    Table,
    Text,
    columns,
)
from prepare.core.utils.machine import busy_sentence, disturbed_times
from prepare.core.utils.numbers import (
    doubt,
    interval_text,
    noise_text,
    part_of_tolerance,
    seconds,
    small,
    speed_text,
    tolerance_text,
    verdict_text,
)
from prepare.core.utils.text import capitalized, plural, printable
from prepare.stages.tune.records import UNPREPARED, CandidateResult, Tuning

_MARKS = {"winner": "better", "wrong": "wrong"}
_KINDS = {"faster": "good", "slower": "bad"}
# What the statuses of recipes mean; others say it themselves.
_RESULTS = {"slower": "slower than another recipe", "not faster": "unclear against the winner"}
# Statuses that the figures in the table do not explain.
_EXPLAINED = ("wrong", "cannot tell", "failed", "not measured")
_COLUMNS = columns(
    "Recipe head, Result text, Time number, Speed text, Interval text, First call number, "
    "Rounds number, Verified text, Error number, Tolerance number"
)
# The columns of the terminal.
_SHORT = ("Recipe", "Speed", "Time", "Interval", "Error", "Result", "First call")
# More bars do not fit on the first screen.
_BARS = 6


def tune_document(shown: ReportContext) -> Document | None:
    """Return what is shown of the tuning of a run; None if it had none."""
    tuning = shown.found.get("tune")
    if tuning is None:
        return None
    return Document(
        name="tune",
        title="Recipes",
        place=10,
        line=tune_sentence(tuning),
        head=f"tune ({_step(tuning)})",
        answers=(_faster(tuning), _right(tuning)),
        advice=tuple(_advice(tuning)),
        parts=lambda: (*_in_terminal(tuning), *_on_page(tuning)),
        # As many bars as fit on the first screen; the section has them all.
        lead=(Charts(charts=tuple(replace(c, rows=c.rows[:_BARS]) for c in _bars(tuning))),),
    )


def tune_sentence(tuning: Tuning) -> str:
    """Return one sentence: `channels_last is 1.3x faster, 163 instead of 214 ms; 3 of 6 recipes timed`."""
    winner = tuning.row(tuning.winner)
    timed = sum(row.rounds > 0 for row in tuning.rows)
    counted = f"{timed} of {plural(len(tuning.rows), 'recipe')} timed"
    if winner.name != UNPREPARED:
        return f"{winner.name} is {_speed(winner, tuning)}; {counted}"
    if tuning.is_clear:
        return f"{winner.name}, as no correct recipe is faster; {counted}"
    why = disturbed_times(tuning.environment, tuning.noise) or "give it more time (tune.budget)"
    return f"unclear, as no recipe was shown to be correct and faster; {counted}; {why}"


def cached_text(tuning: Tuning) -> str:
    """Return `from the cache, measured on 2026-11-25 at 16:25`; empty if it was measured now."""
    day, _, time = tuning.made.partition("T")
    return f"from the cache, measured on {day} at {time[:5]}" if tuning.from_cache else ""


def _faster(tuning: Tuning) -> Answer:
    row, sentence, line = tuning.row(tuning.winner), "", ""
    if row.name == UNPREPARED and not tuning.is_clear:
        kind, answer, remark = "warn", UNCLEAR, "no recipe was shown to be correct and faster"
        sentence = "Speed unclear"
    elif row.name == UNPREPARED or row.ratio is None:
        kind, answer, remark = "plain", "No recipe is faster", row.reason
    else:
        answer = f"{row.name} is {_speed(row, tuning, confidence=None)}"
        between = interval_text(row.ratio_interval, tuning.verdict(row))
        kind, remark = _KINDS.get(tuning.verdict(row), "warn"), f"95 % interval: {between}"
        line = f"{_speed(row, tuning)}, with {row.name}"
    if cached := cached_text(tuning):
        line = f"{line or f'{answer.lower()}: {remark}'}; {cached}"
        remark = f"{remark}; {cached}"
    if busy := busy_sentence(tuning.environment, tuning.noise):
        sentence = f"{sentence or answer}. {capitalized(busy)}"
    return Answer(FASTER, kind, answer, remark, sentence=sentence, line=line)


def _right(tuning: Tuning) -> Answer:
    row, sentence = tuning.row(tuning.winner), ""
    if row.name == UNPREPARED:
        kind, answer, remark = "plain", "Unchanged", "the model as it is"
    elif row.verified == "pass":
        kind, answer, remark, sentence = "good", "Yes", "", "Right"
        if (part := part_of_tolerance(row.error, row.allowed)) is not None:
            remark = f"outputs at {tolerance_text(part)}"
    else:
        kind, answer, sentence = "warn", UNCLEAR, "Unclear if right"
        remark = doubt(row.verified) or "not measured"
    return Answer(RIGHT, kind, answer, remark, sentence=sentence)


def _advice(tuning: Tuning) -> Iterator[Advice]:
    if tuning.winner != UNPREPARED and tuning.holds:
        yield replace(USE_RECIPE, rank=65)
    elif not tuning.is_clear:
        yield Advice(80, "warn", "Tune it longer with tune.budget", "best on an idle machine")
    else:
        yield Advice(90, "plain", "Leave the model as it is", "no correct recipe is faster")


def _in_terminal(tuning: Tuning) -> Iterator[Part]:
    ranked = [row for row in _ranked(tuning) if row.ratio is not None]
    compiled = any(row.first_seconds is not None for row in ranked)
    places = [[title for title, _ in _COLUMNS].index(title) for title in _SHORT][: 6 + compiled]
    yield Table(
        label="Timed recipes",
        columns=tuple((_COLUMNS[at][0].lower(), _COLUMNS[at][1]) for at in places),
        rows=[[_cells(row, tuning)[at] for at in places] for row in ranked],
        most=len(ranked),
        where="terminal",
    )
    reasons: dict[str, list[str]] = {}
    for row in tuning.rows:
        if row.status in _EXPLAINED:
            reasons.setdefault(f"{doubt(row.status)}: {row.reason}", []).append(row.name)
    for reason, names in reasons.items():
        yield Text(text=f"{', '.join(names)}: {reason}", where="terminal")
    yield Text(text=_measured(tuning), where="terminal")
    for note in tuning.notes:
        yield Text(text=f"note: {note}", where="terminal")


def _on_page(tuning: Tuning) -> Iterator[Part]:
    yield Text(text=f"{tune_sentence(tuning)}.", where="page")
    rows = [_cells(row, tuning) for row in _ranked(tuning)]
    yield Table(label="All recipes", columns=_COLUMNS, rows=rows, where="page")
    # The first screen has the first of the bars.
    bars = tuple(chart for chart in _bars(tuning) if len(chart.rows) > _BARS)
    text = "A whisker is the interval of the ratio; together they have 95 % confidence. Recipes that were "
    note = Text(text=text + "eliminated early ran fewer rounds.", kind="note")
    yield Folded(title="Pictures of all recipes", parts=(Charts(charts=bars), note) if bars else ())
    lost = [row for row in _ranked(tuning) if row.status != "winner" and row.reason]
    texts = tuple(f"{row.name}: {row.reason}" for row in lost)
    yield Folded(title="Why the other recipes lost", parts=(Items(texts=texts, kind="note"),))
    notes = (_measured(tuning), *tuning.notes)
    yield Items(texts=notes, kind="note", where="page")


def _bars(tuning: Tuning) -> Iterator[Bars]:
    if rows := [_bar(row, tuning) for row in _ranked(tuning) if row.ratio is not None]:
        title = f"Time of one {_step(tuning)}, against the unprepared model"
        yield Bars(title=title, rows=tuple(rows))


def _step(tuning: Tuning) -> str:
    return "training step" if tuning.mode == "train" else "inference"


def _ranked(tuning: Tuning) -> list[CandidateResult]:
    """Return the winner, then the others from the fastest to the slowest, then those without a time."""
    return sorted(
        tuning.rows, key=lambda row: (row.name != tuning.winner, row.ratio is None, row.ratio or 0)
    )


def _bar(row: CandidateResult, tuning: Tuning) -> Bar:
    return Bar(
        label=row.name,
        value=row.ratio,
        interval=row.ratio_interval,
        text=_verdict(row, tuning),
        mark=_mark(row, tuning),
    )


def _verdict(row: CandidateResult, tuning: Tuning) -> str:
    """Return the verdict on a recipe against the unprepared model: `1.3x faster`."""
    return verdict_text(tuning.verdict(row), row.ratio, row.ratio_interval)


def _speed(row: CandidateResult, tuning: Tuning, *, confidence: float | None = 0.95) -> str:
    """Return the verdict with the times: `1.3x faster, 163 instead of 214 ms (95 % interval: ...)`."""
    unprepared = tuning.row(UNPREPARED).seconds
    time = None if row.ratio is None or unprepared is None else row.ratio * unprepared
    verdict, interval = tuning.verdict(row), row.ratio_interval
    return speed_text(verdict, row.ratio, interval, time=time, confidence=confidence)


def _mark(row: CandidateResult, tuning: Tuning) -> str:
    """Return the colour: as on other pages, slower is than the unprepared model, not than the winner."""
    if row.name == UNPREPARED:
        return "baseline"
    mark = "worse" if tuning.verdict(row) == "slower" else "same"
    return mark if row.status == "winner" and not tuning.holds else _MARKS.get(row.status, mark)


def _cells(row: CandidateResult, tuning: Tuning) -> tuple[str, ...]:
    return (
        row.name,
        _result(row, tuning),
        "" if row.seconds is None else seconds(row.seconds),
        "" if row.name == UNPREPARED else _verdict(row, tuning),
        interval_text(row.ratio_interval, tuning.verdict(row)),
        "" if row.first_seconds is None else seconds(row.first_seconds),
        str(row.rounds or ""),
        doubt(row.verified),
        small(row.error),
        small(row.allowed),
    )


def _result(row: CandidateResult, tuning: Tuning) -> str:
    """Return the result of one recipe in a few words: `winner`, `slower than another recipe`."""
    if row.name == UNPREPARED == tuning.winner and not tuning.is_clear:
        return "kept, as no other is clearly faster"
    if row.status == "winner" and not tuning.holds:
        return "not shown to be faster"
    return printable(_RESULTS.get(row.status, doubt(row.status)))


def _measured(tuning: Tuning) -> str:
    rounds = f"{plural(tuning.rounds, 'round')} in {seconds(tuning.seconds)}"
    return "; ".join(filter(None, (rounds, noise_text(tuning.noise))))
